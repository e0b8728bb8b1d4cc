"""Batches of a dataset, as one process makes them: each is seeded by its number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_convert, get_worker_info

from runner.plugin.collating import Collate, collated, list_indices
from runner.plugin.context import derived_seed
from runner.plugin.failures import Failure, add_place, describe_full_shared_memory, is_shortage
from runner.plugin.registry import FILES, Registry
from runner.plugin.source import Batch
from runner.system.errors import RunnerError
from runner.system.tensor_trees import leaves

Plan = tuple[int, list[int]]
"""Number of a batch and the indices of its samples."""


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


@dataclass
class _GeneratorStates:
    """States of the global generators of Python, NumPy and torch (on the host)."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    torch: Tensor = field(default_factory=torch.get_rng_state)

    def restore(self) -> None:
        """Sets the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class Plugins:
    """Imports the plugin files of the process that pickled it when it is unpickled.

    A spawned worker needs their modules before it unpickles a dataset whose class is in one of them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_plugins, (sorted(map(str, FILES)),)


def _import_plugins(files: list[str]) -> Plugins:
    # One registry for each: a process may have used several, whose plugins have the same names, and
    # files that were removed since.
    for file in files:
        if Path(file).is_file():
            Registry([file])
    return Plugins()


def _share(batch: Batch) -> Batch:
    """Moves the tensors of a batch to shared memory, which torch would do in a thread
    that hides errors.
    """
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided:
            leaf.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return batch


def as_tensors(batch: Batch) -> Batch:
    """Converts the arrays in a batch to tensors."""
    return default_convert(batch)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def deliver(batch: Batch) -> Batch:
    """Converts arrays to tensors; in a worker, also shares their memory."""
    if isinstance(batch, Failure):
        return batch
    try:
        batch = as_tensors(batch)
        return batch if get_worker_info() is None else _share(batch)
    except Exception as error:
        return fail(error)


def fail(error: Exception) -> Failure:
    """Returns an exception to the parent from a worker; raises it again where there is none."""
    if get_worker_info() is None:
        raise error
    return Failure.of(RunnerError(describe_full_shared_memory()) if is_shortage(error) else error)


class _Reading:
    """The samples that the worker processes of a dataset are reading, in memory that they share
    with their parent.
    """

    def __init__(self, workers: int) -> None:
        self.samples = torch.full((workers,), -1) if workers else None
        if self.samples is not None:
            self.samples.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def begin(self, sample: int) -> None:
        """Called by a worker before it reads a sample."""
        worker = get_worker_info()
        if self.samples is not None and worker is not None:
            self.samples[worker.id] = sample

    def of(self, worker: int) -> int | None:
        """Returns the number of the sample that a worker read last; None if it has not started."""
        sample = -1 if self.samples is None else int(self.samples[worker])
        return None if sample < 0 else sample


class NumberedBatches(Dataset[Any]):
    """Batches of a map-style dataset; the number of a batch seeds everything that is random in
    it.
    """

    def __init__(self, data: Any, collate: Collate, seed: int, part: str, *, workers: int = 0) -> None:
        """Keeps the dataset.

        Args:
            data: The map-style dataset.
            collate: Makes samples into a batch.
            seed: Of all batches.
            part: Name of the data in messages ("training data").
            workers: Number of processes that will load batches.
        """
        # The first attribute: attributes are unpickled in order.
        self.plugins = Plugins()
        self.data = data
        self.collate = collate
        self.seed = seed
        self.part = part
        self.reading = _Reading(workers)

    def __getitem__(self, plan: Plan) -> Batch:
        """The batch with this number, of the samples with these indices."""
        number, indices = plan
        try:
            with seeded(derived_seed(self.seed, str(number))):
                samples = self._samples(indices)
                return collated(self.collate, samples, indices, self.part)
        except Exception as error:
            return fail(error)

    def _samples(self, indices: list[int]) -> Any:
        if hasattr(self.data, "__getitems__"):
            self.reading.begin(indices[0])
            try:
                return self.data.__getitems__(indices)
            except Exception as error:
                add_place(error, f"samples {list_indices(indices)} of the {self.part}")
                raise
        samples = []
        for index in indices:
            self.reading.begin(index)
            samples.append(read_sample(self.data, index, self.part))
        return samples


def read_sample(data: Any, index: int, part: str) -> Any:
    """Reads a sample of a map-style dataset; an error names it."""
    try:
        return data[index]
    except Exception as error:
        add_place(error, f"sample {index} of the {part}")
        raise


class Opening:
    """The first samples of a stream, which its reader has read ahead to infer their shapes, and the rest of it."""

    def __init__(self, data: Any, size: int, seed: int, part: str) -> None:
        """Reads as many samples as the first batch of ``StreamedBatches`` with this seed has."""
        _set_epoch(data, 0)
        with seeded(derived_seed(seed, "stream/0")):
            self.stream = iter(data)
        with seeded(derived_seed(seed, "batch/0")):
            self.samples = next_samples(self.stream, size, 0, part)
            self.states = _GeneratorStates()


class StreamedBatches(IterableDataset[Any]):
    """The batches of one pass over a stream; the number of a batch seeds everything that is random in it."""

    def __init__(
        self, data: Any, collate: Collate, size: int, seed: int, part: str, *, first: int = 0,
        epoch: int = 0, drop_last: bool = True, opening: Opening | None = None, workers: int = 0,
    ) -> None:  # fmt: skip
        """Keeps the stream.

        Args:
            data: The stream, an iterable.
            collate: Makes samples into a batch.
            size: Samples of a batch.
            seed: Of all batches.
            part: Name of the data in messages ("training data").
            first: Number of the first batch of this pass.
            epoch: Number of this pass, for streams with ``set_epoch``.
            drop_last: Whether a last batch of fewer samples is left out.
            opening: What was read of this pass already.
            workers: Number of processes that will load batches, at most one.
        """
        self.plugins = Plugins()
        self.data = data
        self.collate = collate
        self.size = size
        self.seed = seed
        self.part = part
        self.first = first
        self.epoch = epoch
        self.drop_last = drop_last
        self.opening = opening
        self.reading = _Reading(workers)

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._batches()
        except Exception as error:
            yield fail(error)

    def _batches(self) -> Iterator[Batch]:
        opening, self.opening = self.opening, None
        if opening is None:
            _set_epoch(self.data, self.epoch)
            with seeded(derived_seed(self.seed, f"stream/{self.first}")):
                stream = iter(self.data)
        else:
            stream = opening.stream
        waiting = [] if opening is None else opening.samples
        for number in itertools.count(self.first):
            begun = (number - self.first) * self.size
            with seeded(derived_seed(self.seed, f"batch/{number}")):
                if opening is not None and number == self.first:
                    opening.states.restore()
                samples, waiting = waiting[: self.size], waiting[self.size :]
                missing = self.size - len(samples)
                samples += next_samples(stream, missing, begun + len(samples), self.part, self.reading)
                if not samples or (self.drop_last and len(samples) < self.size):
                    return
                indices = range(begun, begun + len(samples))
                batch = collated(self.collate, samples, indices, self.part)
            yield batch


def _set_epoch(data: Any, epoch: int) -> None:
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


def next_samples(
    stream: Iterator[Any], count: int, begun: int, part: str, reading: _Reading | None = None
) -> list[Any]:
    """Reads that many samples, or all that are left.

    ``islice`` would call ``iter`` again, with which some streams start over.
    """
    samples: list[Any] = []
    try:
        while len(samples) < count:
            if reading is not None:
                reading.begin(begun + len(samples))
            samples.append(next(stream))
    except StopIteration:
        return samples
    except Exception as error:
        last = begun + len(samples) - 1
        add_place(error, f"{part}, before its first sample" if last < 0 else f"after sample {last} of the {part}")
        raise
    return samples
