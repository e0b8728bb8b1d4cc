"""Parts of a dataset: for the training, for evaluations during it, and for the test after it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Subset

from runner.plugin.class_balance import labels_of
from runner.plugin.folds import GROUPS
from runner.plugin.inspection import is_stream, length
from runner.plugin.rows import Rows, SelectedRows, TensorRows
from runner.plugin.source import Source
from runner.system.errors import RunnerError, UsageError
from runner.system.suggestions import method_named

if TYPE_CHECKING:
    from runner.plugin.configs import DatasetConfig, LimitConfig
    from runner.plugin.context import Context
    from runner.plugin.hybrid_sampling import HybridSampler


_RESIDENT_SHARE = 0.25
"""Largest share of an accelerator's memory that is taken by data."""


class DataParts(Source):
    """The parts of a dataset, and which of their samples are used."""

    group: ClassVar[str] = "group"
    """Name of the entry with the number of a sample's group, which neither ``data.test`` nor a
    cross-validation by group separates.
    """

    config: DatasetConfig
    context: Context
    device: torch.device
    train: Any
    held_out: Any
    test: Any
    """Data for the test after the training; None without any."""
    fold_samples: Tensor | None
    _samples: int | None
    _held_out_samples: int | None
    _test_samples: int | None
    _balanced_labels: Tensor | None
    _hybrid: HybridSampler | None
    _all_data: tuple[Any, ...] | None

    @abstractmethod
    def datasets(self, config: Any) -> tuple[Any, Any] | tuple[Any, Any, Any]:
        """Returns data for the training, for evaluations during it and, if there are any, for the
        test after it.
        """

    def _parts(self, config: DatasetConfig) -> tuple[Any, Any, Any]:
        """Returns the result of ``datasets``, where the data are used; without test data, None."""
        train, held_out, test = parts_of(self, config)
        try:
            placed = None if test is None else self._placed(test)
            parts = self._placed(train), self._placed(held_out), placed
        except RunnerError as error:
            raise RunnerError(f"{method_named(self, 'datasets')}: {error}") from None
        if isinstance(placed, Rows) and not len(placed):
            raise UsageError("data: no sample to test on")
        return parts

    def _limit(self, limit: LimitConfig) -> None:
        """Uses only shares of the samples, drawn at random.

        Raises:
            UsageError: The samples are a stream, which has no numbers.
        """
        self._keep_all_data()
        held_out = count_of(self.held_out, self._held_out_samples)
        parts = {
            "train": (self.train, self._samples),
            "held_out": (self.held_out, held_out),
        }
        if self.test is not None:
            parts["test"] = (self.test, count_of(self.test, self._test_samples))
        numbers = limited_numbers(self.config, limit, parts, self.context.batch_size)
        for name, index in numbers:
            self.select(**{name: index})

    def _set_aside(self, share: float) -> None:
        """Sets a share of the held-out samples aside for the test."""
        self._keep_all_data()
        held_out, test = self.set_aside(self.held_out, share)
        self.held_out = self._placed(held_out)
        self._held_out_samples = length(self.held_out)
        self.test = self._placed(test)
        self._test_samples = length(self.test)

    def set_aside(self, held_out: Any, share: float) -> tuple[Any, Any]:
        """Divides held-out data into those for validation and those for the test (``data.test``).

        By default, samples are drawn at random, and those of a group stay together. Override it
        where samples depend on each other.

        Raises:
            UsageError: The samples cannot be divided.
        """
        count = count_of(held_out, self._held_out_samples)
        groups = labels_of(held_out, self.group, GROUPS)
        validation, test = drawn_numbers(self.config, share, held_out, count, groups)
        return (
            self._selected(held_out, validation, copies=True),
            self._selected(held_out, test, copies=True),
        )

    def has_test(self) -> bool:
        """Returns whether there are test data."""
        return self.test is not None

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Uses the test data as the held-out ones inside the ``with``."""
        held_out = self.held_out
        count = self._held_out_samples
        self.held_out = self.test
        self._held_out_samples = self._test_samples
        try:
            yield
        finally:
            self.held_out = held_out
            self._held_out_samples = count

    def _keep_all_data(self) -> None:
        """Keeps the data of which only parts are used, for the fingerprint."""
        if self._all_data is None:
            self._all_data = self._data()

    def _data(self) -> tuple[Any, ...]:
        test = () if self.test is None else (self.test,)
        return self.train, self.held_out, *test

    def replace_data(self, train: Any, held_out: Any) -> None:
        """Replaces the data by others with the same samples, such as a cache of them.

        The fingerprint remains that of the data that were replaced.
        """
        self._keep_all_data()
        self.train = train
        self.held_out = held_out

    def select(
        self,
        *,
        train: Tensor | None = None,
        held_out: Tensor | None = None,
        test: Tensor | None = None,
    ) -> None:
        """Uses only the samples with these numbers from now on, in this order and as often.

        Args:
            train: Numbers of samples to train on; None leaves them as they are.
            held_out: Numbers of held-out samples, likewise.
            test: Numbers of samples for the test, likewise.

        Raises:
            TypeError: The samples are a stream, which has no numbers.
        """
        if train is not None:
            self.train = self._selected(self.train, train)
            if self._balanced_labels is not None:
                self._balanced_labels = self._balanced_labels[train.cpu()]
            if self._hybrid is not None:
                self._hybrid.select(train.cpu())
            self._samples = len(train)
        if held_out is not None:
            if self.fold_samples is not None:
                self.fold_samples = self.fold_samples[held_out.cpu()]
            self.held_out = self._selected(self.held_out, held_out, copies=True)
            self._held_out_samples = len(held_out)
        if test is not None:
            self.test = self._selected(self.test, test, copies=True)
            self._test_samples = len(test)

    def _selected(self, data: Any, index: Tensor, *, copies: bool = False) -> Any:
        if type(data) is TensorRows and copies:
            # An evaluation may read the tensors of its samples.
            return TensorRows(data.take(index.to(self._home(data))))
        if isinstance(data, Rows):
            return SelectedRows(data, index.to(self._home(data)))
        if is_stream(data):
            samples = f"the samples of '{self.config.kind}'"
            raise TypeError(f"{samples} are a stream: they have no numbers")
        return Subset(data, index.tolist())

    def _placed(self, data: Any) -> Any:
        """Returns data for training or evaluation, in the memory where they are used."""
        rows = TensorRows(data) if isinstance(data, Mapping) else data
        return rows.to(self.device) if self._home(rows).type == "cuda" else rows

    def _home(self, data: Any) -> torch.device:
        """Returns the device for data or numbers of samples: the one that uses them, if
        they fit there.
        """
        host = torch.device("cpu")
        if self.device.type != "cuda" or not isinstance(data, Rows):
            return host
        memory: int = torch.cuda.get_device_properties(self.device).total_memory
        return self.device if data.nbytes <= _RESIDENT_SHARE * memory else host


def parts_of(source: DataParts, config: DatasetConfig) -> tuple[Any, Any, Any]:
    """Returns the result of a source's ``datasets``, with None if it has no test data.

    Raises:
        RunnerError: It is no pair and no triple.
        UsageError: Several workers would read a stream, or ``data.test`` asks for a second test
            part.
    """
    parts: Any = source.datasets(config)
    method = method_named(source, "datasets")
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
        pair = "a pair, what to train on and what to evaluate on"
        expected = f"{pair}, or three with what to test on"
        count = f" of {len(parts)}" if isinstance(parts, tuple | list) else ""
        raise RunnerError(
            f"{method} should return {expected}, got {type(parts).__name__}{count}"
        )
    train, held_out, *others = parts
    test = others[0] if others else None
    streams_train = not isinstance(train, Mapping) and is_stream(train)
    if streams_train and config.workers > 1:
        problem = f"{config.workers} are too many for '{config.kind}'"
        reason = "each would deliver all samples of a stream"
        hint = "use 1 at most, or a map-style Dataset"
        raise UsageError(f"data.workers: {problem}: {reason}; {hint}")
    if test is not None and config.test is not None:
        raise UsageError(
            f"data.test: '{config.kind}' has test data of its own; remove the setting"
        )
    return train, held_out, test


def count_of(data: Any, count: int | None) -> int | None:
    """Returns the number of samples of a part; None for a stream.

    Args:
        data: The part.
        count: Its length if it is no ``Rows``, as far as that is known.
    """
    if isinstance(data, Rows):
        return len(data)
    return None if is_stream(data) else count


def drawn_numbers(
    config: DatasetConfig,
    share: float,
    held_out: Any,
    count: int | None,
    groups: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the numbers of held-out samples for validation and of those for the test.

    They are drawn at random, in the same way for every seed of a recipe, and are in ascending
    order. Complete groups are drawn, until the test has its share or a single group is left.

    Args:
        config: Settings of the source.
        share: Share of the samples for the test.
        held_out: The held-out samples.
        count: Their number, if it is known.
        groups: Group of every sample [count]; None if they have none.

    Raises:
        UsageError: The samples have no numbers, or there are fewer than two, or one group.
    """
    if count is None or (is_stream(held_out) and not isinstance(held_out, Rows)):
        raise UsageError(
            f"data.test: the held-out samples of '{config.kind}' are a stream, whose samples have "
            "no numbers; return a third dataset from datasets"
        )
    if count < 2:
        raise UsageError(
            f"data.test: '{config.kind}' has {count} held-out samples, too few for validation and "
            "test; hold out more, or remove the setting"
        )
    size = min(max(1, round(share * count)), count - 1)
    # Other seeds are tested on the same samples.
    generator = torch.Generator().manual_seed(0)
    if groups is None:
        order = torch.randperm(count, generator=generator)
        return order[size:].sort().values, order[:size].sort().values
    _, group_of_sample, sizes = torch.unique(
        groups, return_inverse=True, return_counts=True
    )
    if len(sizes) < 2:
        raise UsageError(
            f"data.test: the held-out samples of '{config.kind}' are one group, too few for "
            "validation and test; hold out more groups, or remove the setting"
        )
    order = torch.randperm(len(sizes), generator=generator)
    # The samples that are in the test before each group is drawn.
    before = sizes[order].cumsum(0) - sizes[order]
    is_tested = torch.zeros(len(sizes), dtype=torch.bool)
    is_tested[order[:-1][before[:-1] < size]] = True
    in_test = is_tested[group_of_sample]
    return (~in_test).nonzero()[:, 0], in_test.nonzero()[:, 0]


def limited_numbers(
    config: DatasetConfig,
    limit: LimitConfig,
    parts: Mapping[str, tuple[Any, int | None]],
    batch_size: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yields parts of which only a share is used, and the numbers of those samples.

    Args:
        config: Settings of the source.
        limit: The shares.
        parts: Data and number of samples, by the name of the part: train, held_out, test.
        batch_size: Samples of a batch; one batch is left at least.

    Raises:
        UsageError: The samples are a stream, which has no numbers.
    """
    # Other seeds train on the same samples.
    generator = torch.Generator().manual_seed(0)
    for name, (data, count) in parts.items():
        setting = "train" if name == "train" else "held_out"
        share = getattr(limit, setting)
        if share == 1:
            continue
        if count is None or (is_stream(data) and not isinstance(data, Rows)):
            raise UsageError(
                f"data.limit.{setting}: '{config.kind}' is a stream, whose samples have no "
                "numbers; remove it, and set a shorter training"
            )
        size = max(math.ceil(share * count), min(count, batch_size))
        numbers = torch.randperm(count, generator=generator)[:size].sort().values
        yield name, numbers
