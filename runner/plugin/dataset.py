"""Sources that draw from a dataset: in epochs, shuffled, and resumable in the middle of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import default_collate

from runner.plugin.batches import (
    NumberedBatches,
    Opening,
    PassEnd,
    StreamedBatches,
    take_seeded,
)
from runner.plugin.class_balance import (
    balanced_order,
    count_labels,
    labels_of,
    refuse_other_length,
)
from runner.plugin.configs import DatasetConfig
from runner.plugin.context import Context, derived_seed
from runner.plugin.data_parts import DataParts
from runner.plugin.fingerprint import fingerprint_of_data
from runner.plugin.folds import FoldsConfig, divide
from runner.plugin.generators import find_generators, seeded
from runner.plugin.hybrid_sampling import HybridSampler, hybrid_sampler
from runner.plugin.inspection import Facts, Inspection, is_stream, shapes_and_layout
from runner.plugin.learner import Learner
from runner.plugin.loading import load_batches
from runner.plugin.measuring import measure
from runner.plugin.metric_names import join_metrics
from runner.plugin.nested_content import NestedContent
from runner.plugin.passes import endless_batches
from runner.plugin.progress import Progress
from runner.plugin.repeatability import describe_randomness
from runner.plugin.rows import Rows, TensorRows
from runner.plugin.source import UNSENT, Batch, Source, State
from runner.system.errors import RunnerError, UsageError
from runner.system.tensor_trees import map_tensors, same_tensors

_TRAINING = "training data"
"""Name of the data for the training in messages."""
_HELD_OUT = "held-out data"
"""Name of the data for the evaluation in messages."""


class DatasetSource(DataParts):
    """A training set, a held-out set for evaluations, and possibly a test set.

    Write ``datasets``. Each may be tensors by name, ``Rows``, or torch's map-style or iterable
    ``Dataset``, whose samples ``collate`` makes into batches. Every batch follows from the recipe's
    seed and its number alone, also where samples are augmented at random and whatever the number of
    workers, so a resumed run draws the same ones. The last batch of an epoch is left out if it
    would be smaller.
    """

    label: ClassVar[str] = "label"
    """Name of the entry of a batch with the class of a sample, if there is one."""
    rehearsing: bool = False
    """Whether ``evaluate`` is called to report mistakes early: its metrics are thrown away, and
    ``held_out_batches`` yields a single batch.
    """

    def __init__(self, config: DatasetConfig, context: Context) -> None:
        self.config = config
        self.context = context
        self.device = context.device
        self.train, self.held_out, self.test = self._parts(config)
        self._in_tokens = "tokens" in config.units
        self._batch_size = context.batch_size
        self._balanced_labels: Tensor | None = None
        self._hybrid: HybridSampler | None = None
        self._all_data: tuple[Any, ...] | None = None
        """All sets as the source has made them, if only parts of them are used."""
        self.consumed = 0
        self._stream: Iterator[Batch] | None = None
        """Batches of ``_batch_size``, from the first that was not consumed; further ones may be
        sampled in advance.
        """
        self._opening: Opening | None = None
        parts = (self.train, self.held_out, self.test)
        self._content = NestedContent(
            part for part in parts if not isinstance(part, Rows)
        )
        facts = self._inspected()
        self._samples = facts.train
        self._held_out_samples = facts.held_out
        self._test_samples = facts.test
        self.fold_samples: Tensor | None = None
        """Numbers of the held-out samples among all, in a cross-validation [held-out]."""
        if config.test is not None:
            self._set_aside(config.test)
        if config.folds is not None:
            self._divide(config.folds)
        if config.limit is not None:
            self._limit(config.limit)
        # Read now, because a stage may replace the data.
        if config.sampling == "balanced":
            self._balanced_labels = self.checked_labels()
        self._hybrid = hybrid_sampler(self, facts.train)
        if self._hybrid is not None:
            self.feedback = self._hybrid.feedback  # type: ignore[method-assign]
        self.shapes = facts.shapes
        if type(self).layout is Source.layout:
            self.layout = facts.layout

    def _divide(self, folds: FoldsConfig) -> None:
        """Holds out a fold of all samples, and trains on the others.

        Raises:
            UsageError: The samples cannot be divided.
        """
        try:
            if type(self).draw is not DatasetSource.draw:
                raise ValueError("it draws its batches itself")
            name = self.label if folds.by == "class" else self.group
            division = divide(
                self.config,
                folds,
                self.train,
                self.held_out,
                name,
                self._generator("folds"),
                None if self.config.test is None else self.test,
            )
            if reason := describe_randomness(self):
                raise ValueError(f"{reason}, and held-out samples would be, too")
        except ValueError as error:
            problem = f"'{self.config.kind}' cannot be divided: {error}"
            raise UsageError(f"data.folds: {problem}") from None
        self._keep_all_data()
        self.train = self.held_out = division.samples
        self.select(train=division.train, held_out=division.held_out)
        self.fold_samples = division.held_out

    def held_out_labels(self) -> Tensor | None:
        """Returns the class of every held-out sample, [N] on the host; None without labels."""
        return labels_of(self.held_out, self.label)

    def _inspected(self) -> Facts:
        """Returns facts that are needed before the first batch, read by a worker if there is one.

        A process that has read from a dataset must not start workers: they would inherit its open
        files and connections.
        """
        train = None if isinstance(self.train, Rows) else self.train
        held_out = None if isinstance(self.held_out, Rows) else self.held_out
        test = None if isinstance(self.test, Rows) else self.test
        facts = Facts()
        # Otherwise nothing reads data.workers, and the setting is refused.
        if any(part is not None for part in (train, held_out, test)):
            inspection = Inspection(train, held_out, test, self.collate)
            workers = min(self.config.workers, 1)
            if is_stream(train) and not workers:
                self._opening = Opening(
                    train,
                    self.collate,
                    self.context.batch_size,
                    self.context.seed,
                    _TRAINING,
                )
                inspection.samples = self._opening.samples
            (facts,) = load_batches(
                inspection, [0], workers, self._generator("inspection")
            )
        if not isinstance(self.train, Rows):
            return facts
        rows = self.train

        def repeat(times: int) -> Batch:
            index = torch.zeros(times, dtype=torch.int64, device=self._home(rows))
            return rows.take(index)

        with seeded(0):
            shapes, layout = shapes_and_layout(repeat)
        return Facts(len(rows), facts.held_out, facts.test, shapes, layout)

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Makes samples into a batch, by default like torch."""
        return default_collate(list(samples))

    def labels(self) -> Tensor | None:
        """Returns the class of every training sample, [N] on the host, negative if it is unknown;
        None without labels.

        By default that is the tensor ``label`` of rows, or the attribute ``targets`` of a map-style
        dataset.
        """
        return labels_of(self.train, self.label)

    def checked_labels(self) -> Tensor | None:
        """Returns ``labels()``.

        Raises:
            UsageError: There is not one label for each training sample.
        """
        labels = self.labels()
        if labels is not None:
            refuse_other_length(labels, self.train, f"{type(self).__name__}.labels")
        return labels

    def class_counts(self) -> Sequence[int] | None:
        """Returns the number of training samples of each class."""
        labels = self.checked_labels()
        return (
            None if labels is None else count_labels(labels, self.sizes.get("classes"))
        )

    def can_balance(self) -> bool:
        """Returns whether every class can be drawn equally often."""
        return type(self).draw is DatasetSource.draw and self.labels() is not None

    def tokens(self, batch: Batch) -> int:
        """Returns the number of tokens in a batch, for sources that count tokens."""
        return 0

    # The state that collate may need in a worker; data are sent separately.
    def __getstate__(self) -> State:
        attributes = vars(self).items()
        return {name: value for name, value in attributes if name not in UNSENT}

    def draw(self, batch_size: int, progress: Progress) -> Batch:
        """Returns the next batch of the present epoch, or the first of the next one."""
        if self._stream is None or batch_size != self._batch_size:
            self._batch_size = batch_size
            epochs_count = progress.unit == "epochs"
            self._stream = self._batches(
                batch_size, self.consumed, epochs_count=epochs_count
            )
        return next(self._stream)

    def ahead(self) -> int:
        """Returns a large number: a resumed run samples again what was sampled in advance. With
        hybrid sampling, the next batch depends on the losses of the last one.
        """
        return 2**30 if self._hybrid is None else 0

    def can_repeat(self) -> bool:
        """Returns whether batches are drawn by this class, which repeats them."""
        return type(self).draw is DatasetSource.draw

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Returns the number of samples, and of tokens if the source counts them."""
        self.consumed += 1
        if self._hybrid is not None:
            self._hybrid.close()
        counts = {"samples": self._batch_size}
        if self._in_tokens:
            counts["tokens"] = self.tokens(batch)
        return counts

    def epoch_samples(self, batch_size: int) -> int | None:
        """Returns all samples except those of a smaller last batch; None for a stream without a
        length.
        """
        samples = self._samples
        if samples is None:
            return None
        if samples < batch_size:
            limit = f"the {samples:,} samples that '{self.config.kind}' has to train on"
            raise UsageError(f"train.batch_size: {batch_size:,} exceeds {limit}")
        return samples // batch_size * batch_size

    def fingerprint(self) -> str | None:
        """Returns a digest of tables in memory, and of the arrays and files in attributes of
        datasets and of the objects in these.
        """
        data = self._all_data or self._data()
        return fingerprint_of_data(*data, content=self._content)

    def state_dict(self) -> State:
        """Returns the number of batches that were consumed, and the state of hybrid sampling."""
        state: State = {"consumed": self.consumed}
        if self._hybrid is not None:
            state["hybrid"] = self._hybrid.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Continues with the batch after those that were consumed."""
        self.consumed = state["consumed"]
        if self._hybrid is not None:
            self._hybrid.load_state_dict(state["hybrid"])
        self._stream = None

    def _batches(self, size: int, first: int, *, epochs_count: bool) -> Iterator[Batch]:
        """Returns an endless iterator over batches, from the one with number ``first``."""
        count = self.context.overfit_batches
        if count is None:
            return self._all_batches(size, first, epochs_count=epochs_count)
        batches = self._all_batches(size, 0, epochs_count=False)
        repeated = list(itertools.islice(batches, count))
        numbers = itertools.count(first)
        # An update may change its batch in place.
        return (
            map_tensors(torch.clone, repeated[number % len(repeated)])
            for number in numbers
        )

    def _all_batches(
        self, size: int, first: int, *, epochs_count: bool
    ) -> Iterator[Batch]:
        """Returns an endless iterator over the batches of all data, from number ``first``."""
        if is_stream(self.train) and not isinstance(self.train, Rows):
            # A stream has no numbers, so the batches before are read again.
            stream = self._streamed(size, epochs_count=epochs_count)
            return itertools.islice(stream, first, None)
        seed = derived_seed(self.context.seed, "samples")
        rows = self.train
        numbered = self._numbered(size, first)
        if type(rows) is TensorRows:
            return map(rows.take, map(itemgetter(1), numbered))
        if isinstance(rows, Rows):
            generators = find_generators(rows)
            return (
                take_seeded(rows, index, seed, number, generators)
                for number, index in numbered
            )
        plan = ((number, index.tolist()) for number, index in numbered)
        data = NumberedBatches(
            self.train,
            self.collate,
            seed,
            _TRAINING,
            workers=self.config.workers,
            epoch_batches=self._epoch_batches(size),
        )
        return self._loaded(data, "workers", plan)

    def _epoch_batches(self, size: int) -> int:
        epoch_samples = self.epoch_samples(size)
        # Only streams may not report their length.
        assert epoch_samples is not None
        return epoch_samples // size

    def _numbered(self, size: int, first: int) -> Iterator[tuple[int, Tensor]]:
        """Returns an endless iterator over the number of every batch and the indices of its
        samples.
        """
        if self._hybrid is not None:
            drawn = self._hybrid.batches(size, self._home(self.train))
            return zip(itertools.count(first), drawn, strict=False)
        # Iterators in C, because each call of a Python function delays an update.
        stretches = self._index_stretches(size, first)
        indices = itertools.chain.from_iterable(stretches)
        return zip(itertools.count(first), indices, strict=False)

    def _index_stretches(self, size: int, first: int) -> Iterator[Iterable[Tensor]]:
        epoch_batches = self._epoch_batches(size)
        first_epoch, skipped_batches = divmod(first, epoch_batches)
        for epoch in itertools.count(first_epoch):
            generator = self._generator(f"epoch/{epoch}")
            if self._balanced_labels is None:
                order = torch.randperm(self._samples or 0, generator=generator)
            else:
                order = balanced_order(self._balanced_labels, generator)
            order = order.to(self._home(self.train))[: epoch_batches * size]
            if epoch == first_epoch:
                order = order[skipped_batches * size :]
            # One call of torch that makes a thousand views is faster than a thousand slices;
            # all views of an epoch could take much memory.
            for stretch in torch.split(order, 1000 * size):
                yield torch.split(stretch, size)

    def _streamed(self, size: int, *, epochs_count: bool) -> Iterator[Batch]:
        """Returns the batches of a stream, always from the first one.

        Args:
            size: Samples of a batch.
            epochs_count: Whether the training is counted in epochs, so that their length must be
                right.
        """
        stream = StreamedBatches(
            self.train,
            self.collate,
            size,
            self.context.seed,
            _TRAINING,
            endless=True,
            opening=self._opening,
            workers=min(self.config.workers, 1),
        )
        # The samples that were read already can be used once.
        self._opening = None
        batches = self._loaded(stream, "workers")

        def next_pass(*_: int) -> Iterator[Batch]:
            return itertools.takewhile(
                lambda batch: not isinstance(batch, PassEnd), batches
            )

        expected = self.epoch_samples(size) if epochs_count else None
        return endless_batches(
            next_pass, size, self.config.kind, expected, self._samples
        )

    def _loaded(
        self, data: Any, generator_name: str, plan: Iterable[Any] | None = None
    ) -> Iterator[Any]:
        workers = self.config.workers
        if plan is None:
            # Each worker would read all of a stream.
            workers = min(workers, 1)
        generator = self._generator(generator_name)
        # Without workers nothing reads data.prefetch, and the setting is refused.
        prefetch = self.config.prefetch if workers else 1
        # Copies from pinned memory to a GPU do not block the host.
        pinned = self.config.pin and self.device.type == "cuda"
        return load_batches(
            data, plan, workers, generator, prefetch=prefetch, pinned=pinned
        )

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.context.seed, name))

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Returns the learner's metrics over all held-out batches."""
        return self._measure(learner, self._existing(self.held_out_batches()))

    def with_own_metrics(
        self, learner: Learner, metrics: Mapping[str, float], own: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds metrics that the source measures to those of the learner.

        Raises:
            RunnerError: Both have a metric of the same name, and one would be lost.
        """
        method = f"{type(learner).__name__}.metrics"
        return join_metrics(method, metrics, type(self).__name__, own)

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Calls ``evaluate`` with a single held-out batch.

        Raises:
            UsageError: The held-out data are a stream that this process can read only once.
        """
        first = next(self._existing(self.held_out_batches()))
        if is_stream(self.held_out) and not self.config.workers:
            self._refuse_one_pass(first)
        # In the order of an evaluation: stages may compile for the first batch that they see.
        metrics = self._rehearsed(learner, first)
        super().rehearse(learner, batch)
        return metrics

    def _rehearsed(self, learner: Learner, first: Batch) -> dict[str, float]:
        """Returns the metrics of a batch; of all batches if ``evaluate`` fails with so little."""
        seed = derived_seed(self.context.seed, "evaluation")
        with seeded(seed, self.device), learner.evaluating():
            try:
                with self._unchanged():
                    # On the instance, because a plugin may override the method.
                    self.held_out_batches = lambda: iter([first])  # type: ignore[method-assign]
                    self.rehearsing = True
                    return self.evaluate(learner)
            except RunnerError:
                raise
            except Exception:
                if type(self).evaluate is DatasetSource.evaluate:
                    raise
                # Some metrics need all held-out samples, such as one sample of every class.
                with self._unchanged():
                    return self.evaluate(learner)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restores attributes and generators after the ``with``: a resumed run rehearses again, and
        must continue like one that was not interrupted.
        """
        attributes = dict(vars(self))
        generators = self.context.generators
        states = {name: each.get_state() for name, each in generators.items()}
        try:
            yield
        finally:
            vars(self).clear()
            vars(self).update(attributes)
            for name in generators.keys() - states.keys():
                del generators[name]
            for name, state in states.items():
                generators[name].set_state(state)

    def _existing(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches; raises a UsageError if there is none."""
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            problem = f"there is no held-out sample in '{self.config.kind}' (any more)"
            raise UsageError(f"data: {problem}: evaluation needs some")

    def _refuse_one_pass(self, first: Batch) -> None:
        """Raises an error if a stream returns another first batch when it is read again."""
        second = next(iter(self.held_out_batches()), None)
        if second is not None and same_tensors(first, second):
            return
        stream = f"the held-out stream of '{self.config.kind}'"
        problem = "starts with other samples when it is read again"
        hint = (
            "return a new iterator from __iter__, seed what is random in it there, "
            "or use data.workers: 1"
        )
        raise UsageError(
            f"data: {stream} {problem}, so evaluations would differ: {hint}"
        )

    def limit_evaluation(self, samples: int) -> None:
        """Evaluates at most this number of held-out samples, evenly spread, if they are rows."""
        if isinstance(self.held_out, Rows) and len(self.held_out) > samples:
            self.select(held_out=torch.arange(samples) * len(self.held_out) // samples)

    def held_out_batch_size(self) -> int:
        """Returns the samples of a held-out batch, by default those of the recipe's batch."""
        return self.context.batch_size

    def held_out_batches(self) -> Iterator[Batch]:
        """Yields the batches of the held-out set, in order and of the recipe's size;
        the last may be smaller.

        The number of a batch seeds what is random in it, so every evaluation sees the same samples,
        whatever the number of workers.
        """
        size = self.held_out_batch_size()
        seed = derived_seed(self.context.seed, "held_out")
        if isinstance(self.held_out, Rows):
            rows = self.held_out
            index = torch.arange(len(rows), device=self._home(rows))
            # An empty index is split into one empty tensor.
            batches = [batch for batch in torch.split(index, size) if len(batch)]
            generators = find_generators(rows)
            return (
                take_seeded(rows, batch, seed, number, generators)
                for number, batch in enumerate(batches)
            )
        if is_stream(self.held_out):
            stream = StreamedBatches(
                self.held_out,
                self.collate,
                size,
                seed,
                _HELD_OUT,
                drop_last=False,
                workers=min(self.config.workers, 1),
            )
            return self._loaded(stream, "workers")
        indices = range(self._held_out_samples or 0)
        starts = range(0, len(indices), size)
        plan = (
            (number, list(indices[start : start + size]))
            for number, start in enumerate(starts)
        )
        data = NumberedBatches(
            self.held_out, self.collate, seed, _HELD_OUT, workers=self.config.workers
        )
        return self._loaded(data, "workers", plan)

    def _measure(self, learner: Learner, batches: Iterable[Batch]) -> dict[str, float]:
        return measure(learner, batches, self.context)
