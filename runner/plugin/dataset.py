"""Sources that draw from a dataset: in epochs, shuffled, and resumable in the middle of one."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from runner.plugin.batches import NumberedBatches, Opening, StreamedBatches, seeded
from runner.plugin.configs import DatasetConfig
from runner.plugin.context import Context, derived_seed
from runner.plugin.contract import Mean
from runner.plugin.fingerprint import fingerprint_of_data
from runner.plugin.inspection import Facts, Inspection, is_stream, shapes_and_layout
from runner.plugin.learner import Learner
from runner.plugin.loading import load_batches
from runner.plugin.metric_names import join_metrics
from runner.plugin.plugin_errors import noted
from runner.plugin.progress import Progress
from runner.plugin.rows import Rows, SelectedRows, TensorRows
from runner.plugin.source import Batch, Source, State
from runner.system.errors import RunnerError, UsageError
from runner.system.suggestions import method_named
from runner.system.tensor_trees import described, leaves, map_tensors

_RESIDENT_SHARE = 0.25
"""Of an accelerator's memory; data that take no more are kept there."""
_TRAINING, _HELD_OUT = "training data", "held-out data"
"""Names of the two parts in messages."""


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
        self._opening: Opening | None = None
        facts = self._inspected()
        self._samples = facts.train
        self._held_out_samples = facts.held_out
        self.shapes = facts.shapes
        if type(self).layout is Source.layout:
            self.layout = facts.layout

    def _inspected(self) -> Facts:
        """Reads what has to be known before the first batch: in a worker if there are any.

        A process that has read from a dataset must not start workers: they would inherit its open files and
        connections.
        """
        train = None if isinstance(self.train, Rows) else self.train
        held_out = None if isinstance(self.held_out, Rows) else self.held_out
        facts = Facts()
        if train is not None or held_out is not None:  # else nothing reads data.workers, and it is refused
            inspection = Inspection(train, held_out, self.collate)
            workers = min(self.config.workers, 1)
            if is_stream(train) and not workers:
                self._opening = Opening(train, self.context.batch_size, self.context.seed, _TRAINING)
                inspection.samples = self._opening.samples
            (facts,) = load_batches(inspection, [0], workers, self._generator("inspection"))
        if not isinstance(self.train, Rows):
            return facts
        rows = self.train

        def repeat(times: int) -> Batch:
            index = torch.zeros(times, dtype=torch.int64, device=self._home(rows))
            return rows.take(index)

        with seeded(0):
            shapes, layout = shapes_and_layout(repeat)
        return Facts(len(rows), facts.held_out, shapes, layout)

    @abstractmethod
    def datasets(self, config: Any) -> tuple[Any, Any]:
        """Returns the data for the training and the data for the evaluation."""

    def _pair(self, config: DatasetConfig) -> tuple[Any, Any]:
        """Returns the result of ``datasets``; raises a RunnerError if it cannot be trained on."""
        given: Any = self.datasets(config)
        who = method_named(self, "datasets")
        if not isinstance(given, tuple | list) or len(given) != 2:
            pair = "a pair, what to train on and what to evaluate on"
            raise RunnerError(f"{who} should return {pair}, got {type(given).__name__}")
        if not isinstance(given[0], Mapping) and is_stream(given[0]) and config.workers > 1:
            why = "each would deliver all samples of a stream; use 1 at most, or a map-style Dataset"
            raise UsageError(f"data.workers: {config.workers} are too many for '{config.kind}': {why}")
        try:
            train, held_out = map(self._kept, given)
        except RunnerError as error:
            raise RunnerError(f"{who}: {error}") from None
        return train, held_out

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Makes samples into a batch, by default like torch."""
        return default_collate(list(samples))

    def tokens(self, batch: Batch) -> int:
        """Returns the number of tokens in a batch, for sources that count tokens."""
        return 0

    # The state that collate may need in a worker; data are sent separately.
    def __getstate__(self) -> State:
        stays = ("context", "train", "held_out", "_stream", "_opening")
        return {name: value for name, value in vars(self).items() if name not in stays}

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, progress: Progress) -> Batch:
        """The next batch of the present epoch, or the first of the next one."""
        if self._stream is None or batch_size != self._batch_size:
            self._batch_size = batch_size
            epochs_count = progress.unit == "epochs"
            self._stream = self._batches(batch_size, self.consumed, epochs_count=epochs_count)
        return next(self._stream)

    def ahead(self) -> int:
        """Returns a large number: a resumed run samples again what was sampled in advance."""
        return 2**30

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Samples, and tokens if it counts in them."""
        self.consumed += 1
        return {"samples": self._batch_size} | ({"tokens": self.tokens(batch)} if self._in_tokens else {})

    def epoch_samples(self, batch_size: int) -> int | None:
        """Returns all samples except those of a smaller last batch; None for a stream without a length."""
        samples = self._samples
        if samples is None:
            return None
        if samples < batch_size:
            problem = f"{batch_size:,} exceeds the {samples:,} samples that '{self.config.kind}' has to train on"
            raise UsageError(f"train.batch_size: {problem}")
        return samples // batch_size * batch_size

    def fingerprint(self) -> str | None:
        """Returns a digest of tables in memory, and of the files whose paths a dataset's attributes hold."""
        return fingerprint_of_data(self.train, self.held_out)

    def state_dict(self) -> State:
        """Returns the number of batches that were learned from."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: State) -> None:
        """Continues with the batch after those that were learned from."""
        self.consumed, self._stream = state["consumed"], None

    def _batches(self, size: int, first: int, *, epochs_count: bool) -> Iterator[Batch]:
        """Batches without end, from the one with that number."""
        if isinstance(self.train, Rows):
            rows, seed = self.train, derived_seed(self.context.seed, "samples")
            return (_taken(rows, index, seed, number) for number, index in self._numbered(size, first))
        if is_stream(self.train):
            return itertools.islice(self._streamed(size, epochs_count=epochs_count), first, None)
        plan = ((number, index.tolist()) for number, index in self._numbered(size, first))
        seed = derived_seed(self.context.seed, "samples")
        data = NumberedBatches(self.train, self.collate, seed, _TRAINING, workers=self.config.workers)
        return self._loaded(data, "workers", plan)

    def _numbered(self, size: int, first: int) -> Iterator[tuple[int, Tensor]]:
        """The number of every batch and which samples are in it."""
        epoch_samples = self.epoch_samples(size)
        # Only streams may not report their length.
        assert epoch_samples is not None
        batches = epoch_samples // size
        for epoch in itertools.count(first // batches):
            generator = self._generator(f"epoch/{epoch}")
            order = torch.randperm(self._samples or 0, generator=generator).to(self._home(self.train))
            for number in range(max(first, epoch * batches), (epoch + 1) * batches):
                begun = number % batches * size
                yield number, order[begun : begun + size]

    def _streamed(self, size: int, *, epochs_count: bool) -> Iterator[Batch]:
        """Yields the batches of a stream, always from the first one.

        Args:
            size: Samples of a batch.
            epochs_count: Whether the training is counted in epochs, so that their length must be right.
        """
        number = 0
        for epoch in itertools.count():
            first = number
            opening, self._opening = self._opening, None
            stream = StreamedBatches(
                self.train, self.collate, size, self.context.seed, _TRAINING,
                first=first, epoch=epoch, opening=opening, workers=min(self.config.workers, 1),
            )  # fmt: skip
            for batch in self._loaded(stream, f"epoch/{epoch}"):
                number += 1
                yield batch
            if number == first:
                raise UsageError(self._empty_pass(epoch, size))
            if epochs_count and (number - first) * size != self.epoch_samples(size):
                delivered = f"{number - first:,} batches of {size:,} in epoch {epoch + 1}"
                problem = f"the stream delivered {delivered}, and its __len__ is {self._samples:,}"
                hint = "correct it, or use train.updates"
                raise UsageError(f"train.epochs: '{self.config.kind}': {problem}; {hint}")

    def _empty_pass(self, epoch: int, size: int) -> str:
        """The message about a pass over a stream without a batch."""
        kind = self.config.kind
        if not epoch:
            return f"data: '{kind}' has not a single batch of {size:,} samples"
        problem = f"the stream of '{kind}' delivered no batch in pass {epoch + 1}"
        hint = "return a new iterator from __iter__, or train for fewer updates"
        return f"data: {problem}, so it may be one that can be read only once: {hint}"

    def _loaded(self, data: Any, seeded_for: str, plan: Iterable[Any] | None = None) -> Iterator[Any]:
        workers = self.config.workers
        if plan is None:
            # Each worker would read all of a stream.
            workers = min(workers, 1)
        pinned = self.device.type == "cuda"
        return load_batches(data, plan, workers, self._generator(seeded_for), pinned=pinned)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.context.seed, name))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """The learner's metrics over all held-out batches, sums and counts added up."""
        return self._measure(learner, self._existing(self.held_out_batches()))

    def with_own_metrics(
        self, learner: Learner, metrics: Mapping[str, float], own: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds metrics that the source measures to those of the learner.

        Raises:
            RunnerError: Both have a metric of the same name, and one would be lost.
        """
        return join_metrics(f"{type(learner).__name__}.metrics", metrics, type(self).__name__, own)

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Evaluates a single held-out batch.

        Raises:
            UsageError: The held-out data are a stream that this process can read only once.
        """
        first = next(self._existing(self.held_out_batches()))
        if is_stream(self.held_out) and not self.config.workers:
            self._refuse_one_pass(first)
        # In the order of an evaluation: stages may compile for the first batch that they see.
        metrics = self._measure(learner, [first])
        super().rehearse(learner, batch)
        return metrics

    def _existing(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches; raises a UsageError if there is none."""
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            raise UsageError(
                f"data: there is no held-out sample in '{self.config.kind}' (any more): evaluation needs some"
            )

    def _refuse_one_pass(self, first: Batch) -> None:
        """Raises an error if a stream returns another first batch when it is read again."""
        again = next(iter(self.held_out_batches()), None)
        if again is not None and _same_tensors(first, again):
            return
        problem = f"the held-out stream of '{self.config.kind}' starts with other samples when it is read again"
        hint = "return a new iterator from __iter__, seed what is random in it there, or use data.workers: 1"
        raise UsageError(f"data: {problem}, so evaluations would differ: {hint}")

    def limit_evaluation(self, samples: int) -> None:
        """Evaluates at most this number of held-out samples, evenly spread, if they are in memory."""
        if isinstance(self.held_out, Rows) and len(self.held_out) > samples:
            self.select(held_out=torch.arange(samples) * len(self.held_out) // samples)

    def select(self, *, train: Tensor | None = None, held_out: Tensor | None = None) -> None:
        """Uses only the samples with these numbers from now on, in this order and as often.

        Args:
            train: Numbers of samples to train on; None leaves them as they are.
            held_out: Numbers of held-out samples, likewise.

        Raises:
            TypeError: The samples are a stream, which has no numbers.
        """
        if train is not None:
            self.train = self._selected(self.train, train)
            self._samples = len(train)
        if held_out is not None:
            self.held_out = self._selected(self.held_out, held_out, copies=True)
            self._held_out_samples = len(held_out)

    def _selected(self, data: Any, index: Tensor, *, copies: bool = False) -> Any:
        if type(data) is TensorRows and copies:
            # An evaluation may read the tensors of its samples.
            return TensorRows(data.take(index.to(self._home(data))))
        if isinstance(data, Rows):
            return SelectedRows(data, index.to(self._home(data)))
        if is_stream(data):
            raise TypeError(f"the samples of '{self.config.kind}' are a stream: they have no numbers")
        return Subset(data, index.tolist())

    def held_out_batch_size(self) -> int:
        """Returns the samples of a held-out batch, by default those of the recipe's batch."""
        return self.context.batch_size

    def held_out_batches(self) -> Iterator[Batch]:
        """Yields the batches of the held-out set, in order and of the recipe's size;
        the last may be smaller.

        The number of a batch seeds what is random in it, so every evaluation sees the same samples, whatever the
        number of workers.
        """
        size = self.held_out_batch_size()
        seed = derived_seed(self.context.seed, "held_out")
        if isinstance(self.held_out, Rows):
            rows = self.held_out
            index = torch.arange(len(rows), device=self._home(rows))
            parts = (part for part in torch.split(index, size) if len(part))
            return (_taken(rows, part, seed, number) for number, part in enumerate(parts))
        if is_stream(self.held_out):
            workers = min(self.config.workers, 1)
            stream = StreamedBatches(
                self.held_out, self.collate, size, seed, _HELD_OUT, drop_last=False, workers=workers
            )
            return self._loaded(stream, "workers")
        samples = self._held_out_samples or 0
        starts = range(0, samples, size)
        plan = ((number, [*range(start, min(start + size, samples))]) for number, start in enumerate(starts))
        data = NumberedBatches(self.held_out, self.collate, seed, _HELD_OUT, workers=self.config.workers)
        return self._loaded(data, "workers", plan)

    @torch.no_grad()
    def _measure(self, learner: Learner, batches: Iterable[Batch]) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        seed = derived_seed(self.context.seed, "evaluation")
        with seeded(seed), learner.evaluating():
            for number, batch in enumerate(batches):
                moved = map_tensors(lambda tensor: tensor.to(self.device), batch)
                place = partial(_held_out_place, number, batch)
                with noted(place), seeded(derived_seed(seed, str(number)), self.device):
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
        """Returns the device for data or numbers of samples: the one that uses them, if
        they fit there.
        """
        if self.device.type != "cuda" or not isinstance(data, Rows):
            return torch.device("cpu")
        memory: int = torch.cuda.get_device_properties(self.device).total_memory
        return self.device if data.nbytes <= _RESIDENT_SHARE * memory else torch.device("cpu")


def _held_out_place(number: int, batch: Batch) -> str:
    return f"held-out batch {number + 1}: {described(batch)}"


def _taken(rows: Rows, index: Tensor, seed: int, number: int) -> Batch:
    """Returns these rows; the number of the batch seeds what is random in them."""
    if type(rows) is TensorRows:
        return rows.take(index)
    with seeded(derived_seed(seed, str(number))):
        return rows.take(index)


def _same_tensors(first: Batch, second: Batch) -> bool:
    """Returns whether two batches have the same tensors, to the bit."""
    entries, others = ([leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor)] for batch in (first, second))
    if len(entries) != len(others):
        return False
    pairs = zip(entries, others, strict=True)
    return all(entry.shape == other.shape and torch.equal(entry, other) for entry, other in pairs)
