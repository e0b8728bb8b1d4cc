"""Batches of a dataset, as one process makes them: each is seeded by its number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_convert, get_worker_info

from runner.plugin.collating import Collate, collated, copy_samples, list_indices
from runner.plugin.context import derived_seed
from runner.plugin.dataset_epochs import set_epoch
from runner.plugin.failures import (
    Failure,
    add_place,
    describe_full_shared_memory,
    is_shortage,
)
from runner.plugin.generators import HostGeneratorStates, find_generators, seeded
from runner.plugin.registry import FILES, Registry
from runner.plugin.rows import Rows
from runner.plugin.source import Batch
from runner.system.errors import RunnerError
from runner.system.tensor_trees import leaves

Plan = tuple[int, list[int]]
"""Number of a batch and the indices of its samples."""


def take_seeded(
    rows: Rows, index: Tensor, seed: int, number: int, generators: Sequence[Any] = ()
) -> Batch:
    """Returns these rows; the number of the batch seeds what is random in them."""
    with seeded(derived_seed(seed, str(number)), generators=generators):
        return rows.take(index)


class Plugins:
    """Imports the plugin files of the process that pickled it when it is unpickled.

    A spawned worker needs their modules before it unpickles a dataset whose class is in one of
    them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_plugins, (sorted(map(str, FILES)),)


def _import_plugins(files: list[str]) -> Plugins:
    # One registry for each file: a process may have used several registries, whose plugins have the
    # same names, and files that were removed since.
    for file in files:
        if Path(file).is_file():
            Registry([file])
    return Plugins()


def _share(batch: Batch) -> Batch:
    """Moves the tensors of a batch to shared memory, which torch would do in a thread
    that hides errors.
    """
    for _, leaf in leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
            continue
        # Only dense tensors have a single storage.
        if leaf.layout == torch.strided:
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
    if is_shortage(error):
        return Failure.of(RunnerError(describe_full_shared_memory()))
    return Failure.of(error)


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

    def __init__(
        self,
        data: Any,
        collate: Collate,
        seed: int,
        data_name: str,
        *,
        workers: int = 0,
        epoch_batches: int | None = None,
    ) -> None:
        """Keeps the dataset.

        Args:
            data: The map-style dataset.
            collate: Makes samples into a batch.
            seed: Seed from which those of all batches are derived.
            data_name: Name of the data in messages ("training data").
            workers: Number of processes that will load batches.
            epoch_batches: Number of batches in an epoch, of whose number the dataset is told; None
                if all belong to the first.
        """
        # The first attribute: attributes are unpickled in order.
        self.plugins = Plugins()
        self.data = data
        self.collate = collate
        self.seed = seed
        self.data_name = data_name
        self.reading = _Reading(workers)
        self.epoch_batches = epoch_batches
        self.generators: list[Any] | None = None
        """Generators of the dataset, found by the process that makes batches."""

    def __getitem__(self, plan: Plan) -> Batch:
        """Returns the batch with this number, of the samples with these indices."""
        try:
            number = plan[0]
            set_epoch(
                self.data, number // self.epoch_batches if self.epoch_batches else 0
            )
            if self.generators is not None:
                return self._batch(*plan)
            self.generators = find_generators(self.data, self.collate)
            batch = self._batch(*plan)
            generators = find_generators(self.data, self.collate)
            if list(map(id, generators)) == list(map(id, self.generators)):
                return batch
            # The first access has made a generator, which was not seeded.
            self.generators = generators
            return self._batch(*plan)
        except Exception as error:
            return fail(error)

    def _batch(self, number: int, indices: list[int]) -> Batch:
        with seeded(
            derived_seed(self.seed, str(number)), generators=self.generators or ()
        ):
            samples = self._samples(indices)
            return collated(self.collate, samples, indices, self.data_name)

    def _samples(self, indices: list[int]) -> Any:
        if hasattr(self.data, "__getitems__"):
            self.reading.begin(indices[0])
            try:
                return self.data.__getitems__(indices)
            except Exception as error:
                add_place(
                    error, f"samples {list_indices(indices)} of the {self.data_name}"
                )
                raise
        samples = []
        for index in indices:
            self.reading.begin(index)
            samples.append(read_sample(self.data, index, self.data_name))
        return samples


def read_sample(data: Any, index: int, data_name: str) -> Any:
    """Reads a sample of a map-style dataset; an error names it."""
    try:
        return data[index]
    except Exception as error:
        add_place(error, f"sample {index} of the {data_name}")
        raise


class Opening:
    """The first samples of a stream, which its reader has read ahead to infer their shapes, and the
    rest of it.
    """

    def __init__(
        self, data: Any, collate: Collate, size: int, seed: int, data_name: str
    ) -> None:
        """Reads as many samples as the first batch of ``StreamedBatches`` with this seed has."""
        set_epoch(data, 0)
        generators = find_generators(collate)
        with seeded(derived_seed(seed, "stream/0"), generators=generators):
            self.stream = iter(data)
        with seeded(derived_seed(seed, "batch/0"), generators=generators):
            self.samples = next_samples(self.stream, size, 0, data_name)
            self.states = HostGeneratorStates(generators)


class PassEnd:
    """Follows the last batch of a pass over a stream."""


class StreamedBatches(IterableDataset[Any]):
    """The batches of one pass over a stream, or of all passes; the number of a batch seeds the
    global generators and those of ``collate``.

    A generator that belongs to the stream continues: it may be part of the state of a pass.
    """

    def __init__(
        self,
        data: Any,
        collate: Collate,
        size: int,
        seed: int,
        data_name: str,
        *,
        endless: bool = False,
        drop_last: bool = True,
        opening: Opening | None = None,
        workers: int = 0,
    ) -> None:
        """Keeps the stream.

        Args:
            data: The stream, an iterable.
            collate: Makes samples into a batch.
            size: Samples of a batch.
            seed: Seed from which those of all batches are derived.
            data_name: Name of the data in messages ("training data").
            endless: Whether pass after pass is read, with a ``PassEnd`` after each. One object
                reads them all, so that the state of a stream is that of all passes before.
            drop_last: Whether a last batch of fewer samples is left out.
            opening: What was read of the first pass already.
            workers: Number of processes that will load batches, at most one.
        """
        self.plugins = Plugins()
        self.data = data
        self.collate = collate
        self.size = size
        self.seed = seed
        self.data_name = data_name
        self.endless = endless
        self.drop_last = drop_last
        self.opening = opening
        self.reading = _Reading(workers)
        self.generators: list[Any] = []
        """Generators of ``collate``, found by the process that makes batches."""
        self.has_collated = False

    def __iter__(self) -> Iterator[Batch]:
        try:
            self.generators = find_generators(self.collate)
            yield from self._passes() if self.endless else self._batches(0, 0)
        except Exception as error:
            yield fail(error)

    def _passes(self) -> Iterator[Batch | PassEnd]:
        first = 0
        for epoch in itertools.count():
            for batch in self._batches(first, epoch):
                first += 1
                yield batch
            yield PassEnd()

    def _batches(self, first: int, epoch: int) -> Iterator[Batch]:
        """Yields the batches of a pass, the first of which has that number among all."""
        opening = self.opening
        # Its stream can be read only once.
        self.opening = None
        pending: list[Any] = []
        if opening is None:
            set_epoch(self.data, epoch)
            with self._seeded(f"stream/{first}"):
                stream = iter(self.data)
        else:
            stream = opening.stream
            pending = opening.samples
        for number in itertools.count(first):
            start = (number - first) * self.size
            # The evaluation of a held-out stream with the same reader has set another one.
            set_epoch(self.data, epoch)
            with self._seeded(f"batch/{number}"):
                # The first samples were read under the same seed, and the generators continue
                # after them.
                if opening is not None and number == first:
                    opening.states.restore()
                samples = pending[: self.size]
                pending = pending[self.size :]
                missing = self.size - len(samples)
                next_index = start + len(samples)
                samples += next_samples(
                    stream, missing, next_index, self.data_name, self.reading
                )
                if not samples or (self.drop_last and len(samples) < self.size):
                    return
                indices = range(start, start + len(samples))
                batch = self._collated(number, samples, indices)
            yield batch

    def _seeded(self, name: str) -> AbstractContextManager[None]:
        return seeded(derived_seed(self.seed, name), generators=self.generators)

    def _collated(
        self, number: int, samples: list[Any], indices: Sequence[int]
    ) -> Batch:
        """Makes samples into the batch with this number."""
        if self.has_collated:
            return collated(self.collate, samples, indices, self.data_name)
        states = HostGeneratorStates(self.generators)
        copies = copy_samples(samples)
        batch = collated(self.collate, samples, indices, self.data_name)
        self.has_collated = True
        generators = find_generators(self.collate)
        if list(map(id, generators)) == list(map(id, self.generators)):
            return batch
        # The first call has made a generator, which was not seeded.
        self.generators = generators
        with self._seeded(f"batch/{number}"):
            states.restore()
            return collated(self.collate, copies, indices, self.data_name)


def next_samples(
    stream: Iterator[Any],
    count: int,
    start: int,
    data_name: str,
    reading: _Reading | None = None,
) -> list[Any]:
    """Reads the next ``count`` samples of a stream, or all that remain.

    Args:
        stream: The stream.
        count: Number of samples.
        start: Number of the first of them.
        data_name: Name of the data in messages.
        reading: Records which sample a worker reads.
    """
    # ``islice`` would call ``iter`` again, with which some streams start over.
    samples: list[Any] = []
    try:
        while len(samples) < count:
            if reading is not None:
                reading.begin(start + len(samples))
            samples.append(next(stream))
    except StopIteration:
        return samples
    except Exception as error:
        last = start + len(samples) - 1
        position = f"after sample {last} of the {data_name}"
        if last < 0:
            position = f"{data_name}, before its first sample"
        add_place(error, position)
        raise
    return samples
