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
from runner.plugin.learner import Learner, Mean
from runner.plugin.progress import Progress
from runner.plugin.source import Batch, DatasetConfig, Source, State
from runner.system.errors import RunnerError, UsageError
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
        self.tensors = dict(tensors)
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
        self.train, self.held_out = (self._kept(data) for data in self.datasets(config))
        self._in_memory = isinstance(self.train, Rows)  # asking a protocol takes microseconds
        self._in_tokens = "tokens" in config.units
        self._batch_size = context.batch_size
        self.drawn = self.consumed = 0  # batches; what was drawn ahead is not consumed yet
        self._stream: Iterator[Batch] | None = None
        self._order: tuple[int, int, Sequence[Tensor]] = (0, 0, ())
        """Batch size and first number of an epoch, and which samples are in each of its batches."""
        if self._in_memory:
            sample = self.train.take(torch.zeros(1, dtype=torch.int64, device=self._home(self.train)))
        else:
            with seeded(0):
                iterable = isinstance(self.train, IterableDataset)
                sample = self.collate([next(iter(self.train)) if iterable else self.train[0]])
        self.shapes = {name: tuple(leaf.shape[1:]) for name, leaf in leaves(sample) if isinstance(leaf, Tensor)}

    @abstractmethod
    def datasets(self, config: Any) -> tuple[Any, Any]:
        """What to train on, and what to evaluate on."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Makes samples into a batch; torch's way unless told."""
        return default_collate(list(samples))

    def __getstate__(self) -> State:  # what collate may need in a worker; data go there by themselves
        stays = ("context", "train", "held_out", "_stream", "_order")
        return {name: value for name, value in self.__dict__.items() if name not in stays}

    def tokens(self, batch: Batch) -> int:
        """How many tokens a batch holds, for sources that count in them."""
        return 0

    # --- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int, progress: Progress) -> Batch:
        """The next batch of the present epoch, or the first of the next one."""
        self._batch_size = batch_size
        if self._in_memory:
            batch = self.train.take(self._indices(self.drawn, batch_size))
        else:
            if self._stream is None:
                self._stream = self._batches(batch_size, self.drawn)
            batch = next(self._stream)
        self.drawn += 1
        return batch

    def ahead(self) -> int:
        """As many as one likes: what has been drawn ahead of the updates is drawn again by a resumed run."""
        return 2**30

    def counts(self, batch: Batch | None) -> Mapping[str, int]:
        """Samples, and tokens if it counts in them."""
        self.consumed += 1
        return {"samples": self._batch_size} | ({"tokens": self.tokens(batch)} if self._in_tokens else {})

    def epoch_samples(self, batch_size: int) -> int | None:
        """All samples but those of a smaller last batch."""
        return None if isinstance(self.train, IterableDataset) else self._per_epoch(batch_size) * batch_size

    def state_dict(self) -> State:
        """How many batches were learnt from."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: State) -> None:
        """Goes on with the batch after those that were learnt from."""
        self.consumed = self.drawn = state["consumed"]
        self._stream = None

    def _per_epoch(self, batch_size: int) -> int:
        samples = len(self.train)
        if samples < batch_size:
            problem = f"{batch_size:,} is more than the {samples:,} samples that '{self.config.kind}' has to train on"
            raise UsageError(f"train.batch_size: {problem}")
        return samples // batch_size

    def _indices(self, number: int, batch_size: int) -> Tensor:
        """Which samples are in the batch of that number."""
        size, first, batches = self._order
        if size != batch_size or not first <= number < first + len(batches):
            count = self._per_epoch(batch_size)
            epoch = number // count
            order = torch.randperm(len(self.train), generator=self._generator(f"epoch/{epoch}"))
            batches = torch.split(order.to(self._home(self.train))[: count * batch_size], batch_size)
            first = epoch * count
            self._order = batch_size, first, batches
        return batches[number - first]

    def _batches(self, batch_size: int, first: int) -> Iterator[Batch]:
        """Batches without end, from the one with that number."""
        if not isinstance(self.train, IterableDataset):
            plan = ((number, self._indices(number, batch_size).tolist()) for number in itertools.count(first))
            numbered = _Numbered(self.train, self.collate, derived_seed(self.context.seed, "samples"))
            yield from self._loader(numbered, "workers", sampler=plan, batch_size=None)
            return
        number = 0
        for epoch in itertools.count():
            if hasattr(self.train, "set_epoch"):
                self.train.set_epoch(epoch)
            options = {"batch_size": batch_size, "drop_last": True, "collate_fn": self.collate}
            stream, begun = iter(self._loader(self.train, f"epoch/{epoch}", **options)), number
            while True:
                with seeded(derived_seed(self.context.seed, f"batch/{number}")):
                    batch = next(stream, None)
                if batch is None:
                    break
                number += 1
                if number > first:
                    yield batch
            if number == begun:
                raise UsageError(f"data: '{self.config.kind}' has not a single batch of {batch_size:,} samples")

    def _loader(self, data: Any, seeded_for: str, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            data,
            num_workers=self.config.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.config.workers else None,
            generator=self._generator(seeded_for),
            **options,
        )

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.context.seed, name))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, learner: Learner) -> dict[str, float]:
        """The learner's metrics over all held-out batches, sums and counts added up."""
        return self._measure(learner, derived_seed(self.context.seed, "evaluation"), self.held_out_batches())

    def rehearse(self, learner: Learner, batch: Batch) -> dict[str, float]:
        """Evaluates a single held-out batch."""
        super().rehearse(learner, batch)
        return self._measure(learner, 0, itertools.islice(self.held_out_batches(), 1))

    def held_out_batches(self) -> Iterator[Batch]:
        """All of the held-out set, in order, in batches of the recipe's size; the last may be smaller."""
        size = self.context.batch_size
        if isinstance(self.held_out, Rows):
            for start in range(0, len(self.held_out), size):
                stop = min(start + size, len(self.held_out))
                yield self.held_out.take(torch.arange(start, stop, device=self._home(self.held_out)))
        else:
            yield from self._loader(self.held_out, "workers", batch_size=size, collate_fn=self.collate)

    @torch.no_grad()
    def _measure(self, learner: Learner, seed: int, batches: Iterable[Batch]) -> dict[str, float]:
        totals: dict[str, tuple[float, float]] = {}
        with seeded(seed), learner.evaluating():
            for batch in batches:
                metrics: Any = learner.metrics(map_tensors(lambda tensor: tensor.to(self.device), batch))
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
        if self.device.type == "cuda" and isinstance(data, Rows):
            memory: int = torch.cuda.get_device_properties(self.device).total_memory
            if data.nbytes <= _RESIDENT_SHARE * memory:
                return self.device
        return torch.device("cpu")


class _Numbered(Dataset[Any]):
    """A map-style dataset that is asked for whole batches: each by its number, which seeds what is random in it."""

    def __init__(self, data: Any, collate: Any, seed: int) -> None:
        self.data, self.collate, self.seed = data, collate, seed

    def __getitem__(self, numbered: tuple[int, list[int]]) -> Batch:
        number, indices = numbered
        with seeded(derived_seed(self.seed, str(number))):
            if hasattr(self.data, "__getitems__"):
                return self.collate(self.data.__getitems__(indices))
            return self.collate([self.data[index] for index in indices])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of Python, NumPy and torch (on the host) inside the ``with``, and puts them back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
