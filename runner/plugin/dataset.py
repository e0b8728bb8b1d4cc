"""Sources that draw from a dataset: in epochs, shuffled, and resumable in the middle of one."""

from __future__ import annotations

import itertools
import math
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from runner.plugin.context import Context, derived_seed
from runner.plugin.contract import Mean
from runner.plugin.faces import DatasetConfig
from runner.plugin.learner import Learner
from runner.plugin.metric_names import join_metrics
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, Source, State
from runner.system.errors import RunnerError, UsageError
from runner.system.names import method_named
from runner.system.tree import leaves, map_tensors

_RESIDENT_SHARE = 0.25
"""Of an accelerator's memory; data that take no more are kept there."""


@runtime_checkable
class Rows(Protocol):
    """Data that are in memory as a whole, of which many samples can be had at once."""

    nbytes: int

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> Batch:
        """The samples with these numbers, [B], as a batch."""

    def to(self, device: torch.device) -> Rows:
        """The same data on a device."""


class TensorRows:
    """Tensors by name, with one row for each sample."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the tensors; a RunnerError if one is none, or if they have not as many rows as one another."""
        self.tensors = dict(tensors)
        given: Mapping[str, Any] = self.tensors
        for name, each in given.items():
            if not isinstance(each, Tensor):
                remedy = "; torch.from_numpy makes it one" if isinstance(each, np.ndarray) else ""
                raise RunnerError(f"'{name}' should be a tensor, got {type(each).__name__}{remedy}")
        rows = {name: len(tensor) if tensor.dim() else 0 for name, tensor in self.tensors.items()}
        if len(set(rows.values())) != 1:
            counted = ", ".join(f"'{name}' has {count:,}" for name, count in rows.items()) or "there are no tensors"
            raise RunnerError(f"every tensor should have one row for each sample, but {counted}")
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def take(self, index: Tensor) -> Batch:
        """The rows with these numbers."""
        return {name: tensor.index_select(0, index) for name, tensor in self.tensors.items()}

    def to(self, device: torch.device) -> TensorRows:
        """The same rows on a device."""
        return TensorRows({name: tensor.to(device) for name, tensor in self.tensors.items()})


class DatasetSource(Source):
    """A training set and a held-out set.

    Write ``datasets``. Each may be tensors by name, ``Rows``, or torch's map-style or iterable ``Dataset``, whose
    samples ``collate`` makes into batches. Every batch follows from the recipe's seed and its number alone, also where
    samples are augmented at random and whatever the number of workers, so a resumed run draws the same ones.
    The last batch of an epoch is left out if it would be smaller.
    """

    def __init__(self, config: DatasetConfig, context: Context) -> None:
        self.config, self.context, self.device = config, context, context.device
        self.train, self.held_out = self._pair(config)
        self._in_tokens = "tokens" in config.units
        self._batch_size, self.consumed = context.batch_size, 0
        self._stream: Iterator[Batch] | None = None
        """Batches of that size, from the first that was not consumed; more may be drawn than are consumed yet."""
        with seeded(0):
            if isinstance(self.train, Rows):
                sample = self.train.take(torch.zeros(1, dtype=torch.int64, device=self._home(self.train)))
            else:
                iterable = isinstance(self.train, IterableDataset)
                sample = self.collate([next(iter(self.train)) if iterable else self.train[0]])
        self.shapes = {name: tuple(leaf.shape[1:]) for name, leaf in leaves(sample) if isinstance(leaf, Tensor)}

    @abstractmethod
    def datasets(self, config: Any) -> tuple[Any, Any]:
        """What to train on, and what to evaluate on."""

    def _pair(self, config: DatasetConfig) -> tuple[Any, Any]:
        """What ``datasets`` returned, kept where it is used; a RunnerError if it cannot be trained on."""
        given: Any = self.datasets(config)
        who = method_named(self, "datasets")
        if not isinstance(given, tuple | list) or len(given) != 2:
            pair = "a pair, what to train on and what to evaluate on"
            raise RunnerError(f"{who} should return {pair}, got {type(given).__name__}")
        if isinstance(given[0], IterableDataset) and config.workers > 1:
            why = "each would deliver all samples of an IterableDataset; use 1 at most, or a map-style Dataset"
            raise UsageError(f"data.workers: {config.workers} are too many for '{config.kind}': {why}")
        try:
            train, held_out = map(self._kept, given)
        except RunnerError as error:
            raise RunnerError(f"{who}: {error}") from None
        return train, held_out

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Makes samples into a batch; torch's way unless told."""
        return default_collate(list(samples))

    def tokens(self, batch: Batch) -> int:
        """How many tokens a batch holds, for sources that count in them."""
        return 0

    def __getstate__(self) -> State:  # what collate may need in a worker; data go there by themselves
        stays = ("context", "train", "held_out", "_stream")
        return {name: value for name, value in vars(self).items() if name not in stays}

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, progress: Progress) -> Batch:
        """The next batch of the present epoch, or the first of the next one."""
        if self._stream is None or batch_size != self._batch_size:
            self._batch_size, self._stream = batch_size, self._batches(batch_size, self.consumed)
        return next(self._stream)

    def ahead(self) -> int:
        """As many as one likes: what has been drawn ahead of the updates is drawn again by a resumed run."""
        return 2**30

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Samples, and tokens if it counts in them."""
        self.consumed += 1
        return {"samples": self._batch_size} | ({"tokens": self.tokens(batch)} if self._in_tokens else {})

    def epoch_samples(self, batch_size: int) -> int | None:
        """All samples but those of a smaller last batch."""
        if isinstance(self.train, IterableDataset):
            return None
        samples = len(self.train)
        if samples < batch_size:
            problem = f"{batch_size:,} is more than the {samples:,} samples that '{self.config.kind}' has to train on"
            raise UsageError(f"train.batch_size: {problem}")
        return samples // batch_size * batch_size

    def state_dict(self) -> State:
        """How many batches were learnt from."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: State) -> None:
        """Goes on with the batch after those that were learnt from."""
        self.consumed, self._stream = state["consumed"], None

    def _batches(self, size: int, first: int) -> Iterator[Batch]:
        """Batches without end, from the one with that number."""
        if isinstance(self.train, IterableDataset):
            return itertools.islice(self._streamed(size), first, None)
        if isinstance(self.train, Rows):
            return (self.train.take(index) for _, index in self._numbered(size, first))
        plan = ((number, index.tolist()) for number, index in self._numbered(size, first))
        seeding = _Seeding(self.train, self.collate, derived_seed(self.context.seed, "samples"))
        return iter(self._loader(seeding, "workers", sampler=plan, batch_size=None))

    def _numbered(self, size: int, first: int) -> Iterator[tuple[int, Tensor]]:
        """The number of every batch and which samples are in it."""
        each = (self.epoch_samples(size) or 0) // size  # only an iterable dataset has none
        for epoch in itertools.count(first // each):
            generator = self._generator(f"epoch/{epoch}")
            order = torch.randperm(len(self.train), generator=generator).to(self._home(self.train))
            for number in range(max(first, epoch * each), (epoch + 1) * each):
                begun = number % each * size
                yield number, order[begun : begun + size]

    def _streamed(self, size: int) -> Iterator[Batch]:
        """The batches of an iterable dataset, from the very first one: it cannot begin elsewhere."""
        number = 0
        for epoch in itertools.count():
            if hasattr(self.train, "set_epoch"):
                self.train.set_epoch(epoch)
            begun = number
            stream = _Stream(self.train, self.collate, size, self.context.seed, begun)
            for batch in self._loader(stream, f"epoch/{epoch}", batch_size=None):
                number += 1
                yield batch
            if number == begun:
                raise UsageError(f"data: '{self.config.kind}' has not a single batch of {size:,} samples")

    def _loader(self, data: Any, seeded_for: str, **options: Any) -> DataLoader[Any]:
        workers, pinned = self.config.workers, self.device.type == "cuda"
        if isinstance(data, IterableDataset):
            workers = min(workers, 1)  # each would read all of it
        options |= {"num_workers": workers, "pin_memory": pinned, "prefetch_factor": 4 if workers else None}
        return DataLoader(data, generator=self._generator(seeded_for), **options)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.context.seed, name))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """The learner's metrics over all held-out batches, sums and counts added up."""
        return self._measure(learner, self.held_out_batches())

    def with_own_metrics(
        self, learner: Learner, metrics: Mapping[str, float], own: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds metrics that the source measures to those of the learner.

        Raises:
            RunnerError: Both have a metric of the same name, of which one would be lost.
        """
        return join_metrics(f"{type(learner).__name__}.metrics", metrics, type(self).__name__, own)

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Evaluates a single held-out batch."""
        super().rehearse(learner, batch)
        return self._measure(learner, itertools.islice(self.held_out_batches(), 1))

    def held_out_batches(self) -> Iterator[Batch]:
        """All of the held-out set, in order, in batches of the recipe's size; the last may be smaller."""
        size = self.context.batch_size
        if isinstance(self.held_out, Rows):
            index = torch.arange(len(self.held_out), device=self._home(self.held_out))
            return (self.held_out.take(part) for part in torch.split(index, size) if len(part))
        return iter(self._loader(self.held_out, "workers", batch_size=size, collate_fn=self.collate))

    @torch.no_grad()
    def _measure(self, learner: Learner, batches: Iterable[Batch]) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        seed = derived_seed(self.context.seed, "evaluation")
        with seeded(seed), learner.evaluating():
            for number, batch in enumerate(batches):
                moved = map_tensors(lambda tensor: tensor.to(self.device), batch)
                with seeded(derived_seed(seed, str(number)), self.device):
                    metrics: Any = learner.metrics(moved)
                if not isinstance(metrics, Mapping) or not all(isinstance(mean, Mean) for mean in metrics.values()):
                    who = f"{type(learner).__name__}.metrics"
                    raise RunnerError(f"{who} should return Mean(sum, count) by name, got {metrics!r:.200}")
                for name, mean in metrics.items():
                    total, count = totals.get(name, (0.0, 0.0))
                    totals[name] = total + float(mean.sum), count + float(mean.count)
        return {name: total / count if count else math.nan for name, (total, count) in totals.items()}

    def _kept(self, data: Any) -> Any:
        rows = TensorRows(data) if isinstance(data, Mapping) else data
        return rows.to(self.device) if self._home(rows).type == "cuda" else rows

    def _home(self, data: Any) -> torch.device:
        """Where data, or the numbers of their samples, are kept: where they are used if they fit there."""
        if self.device.type != "cuda" or not isinstance(data, Rows):
            return torch.device("cpu")
        memory: int = torch.cuda.get_device_properties(self.device).total_memory
        return self.device if data.nbytes <= _RESIDENT_SHARE * memory else torch.device("cpu")


class _Seeding(Dataset[Any]):
    """A map-style dataset that is asked for whole batches: each by its number, which seeds what is random in it."""

    def __init__(self, data: Any, collate: Any, seed: int) -> None:
        self.data, self.collate, self.seed = data, collate, seed

    def __getitem__(self, numbered: tuple[int, list[int]]) -> Batch:
        number, indices = numbered
        with seeded(derived_seed(self.seed, str(number))):
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(indices))
            return self.collate([self.data[index] for index in indices])


class _Stream(IterableDataset[Any]):
    """One pass over an iterable dataset, in whole batches: each is seeded by its number, whoever makes it."""

    def __init__(self, data: Any, collate: Any, size: int, seed: int, first: int) -> None:
        self.data, self.collate, self.size, self.seed, self.first = data, collate, size, seed, first

    def __iter__(self) -> Iterator[Batch]:
        with seeded(derived_seed(self.seed, f"stream/{self.first}")):
            stream = iter(self.data)
        for number in itertools.count(self.first):
            with seeded(derived_seed(self.seed, f"batch/{number}")):
                samples = list(itertools.islice(stream, self.size))
                if len(samples) < self.size:
                    return
                batch = self.collate(samples)
            yield batch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds the global generators inside the ``with`` and restores them afterwards.

    Args:
        seed: For the generators of Python, NumPy and torch.
        device: A GPU whose generator is seeded, too; without one, torch's is seeded on the host alone.
    """
    torch_generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch_generators.append(torch.cuda.default_generators[device.index or 0])
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_states = [generator.get_state() for generator in torch_generators]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in torch_generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(torch_generators, torch_states, strict=True):
            generator.set_state(state)
