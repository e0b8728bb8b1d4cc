"""Facts about a dataset that only reading it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from runner.plugin.batches import (
    Plugins,
    as_tensors,
    fail,
    next_samples,
    read_sample,
)
from runner.plugin.collating import Collate, collated, copy_samples
from runner.plugin.dataset_epochs import set_epoch
from runner.plugin.failures import Failure
from runner.plugin.generators import find_generators, seeded
from runner.plugin.rows import Rows
from runner.plugin.source import Batch
from runner.system.errors import RunnerError, UsageError
from runner.system.tensor_trees import BatchLayout, inferred_layout, leaves


@dataclass(frozen=True)
class Facts:
    """Facts about a dataset that only reading it shows.

    Attributes:
        train: Number of samples to train on; None if a stream does not report it.
        held_out: Number of held-out samples, likewise.
        test: Number of samples for the test, likewise.
        shapes: Shape of every tensor of a batch without the batch dimension, by dotted name.
        layout: Which entries of a batch have one row per sample.
    """

    train: int | None = None
    held_out: int | None = None
    test: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: BatchLayout = field(default_factory=BatchLayout)


@dataclass
class Inspection(Dataset[Any]):
    """Reads the first sample of a dataset, in whichever process it is requested.

    Attributes:
        plugins: Must be the first attribute, because attributes are unpickled in order.
        train: Data for the training, a map-style dataset or a stream; None to skip it.
        held_out: Data for the evaluation, likewise.
        test: Data for the test, likewise.
        collate: Makes samples into a batch.
        samples: First samples that were read already; None reads one.
    """

    plugins: Plugins = field(default_factory=Plugins, init=False)
    train: Any
    held_out: Any
    test: Any
    collate: Collate
    samples: Sequence[Any] | None = None

    def __getitem__(self, number: int) -> Facts | Failure:
        """Returns the facts."""
        try:
            generators = find_generators(self.train, self.collate)
            # Reading a sample may use random numbers, which the training must not notice.
            with seeded(number, generators=generators):
                return self._facts()
        except Exception as error:
            return fail(error)

    def _facts(self) -> Facts:
        held_out = None if self.held_out is None else length(self.held_out)
        test = None if self.test is None else length(self.test)
        if test == 0:
            raise UsageError("data: no sample to test on")
        if self.train is None:
            return Facts(held_out=held_out, test=test)
        count = length(self.train)
        if count == 0:
            raise UsageError("data: no sample to train on")
        sample = self._first_sample()

        def repeat(times: int) -> Batch:
            # ``collate`` may change samples in place, and they may be used again.
            samples = [copy_samples([sample])[0] for _ in range(times)]
            return as_tensors(
                collated(self.collate, samples, times * [0], "training data")
            )

        return Facts(count, held_out, test, *shapes_and_layout(repeat))

    def _first_sample(self) -> Any:
        if self.samples is None:
            set_epoch(self.train, 0)
        if self.samples is not None:
            samples = list(self.samples)
        elif is_stream(self.train):
            samples = next_samples(iter(self.train), 1, 0, "training data")
        else:
            samples = [read_sample(self.train, 0, "training data")]
        if not samples:
            raise UsageError("data: the stream to train on has no sample")
        return samples[0]


def shapes_and_layout(
    repeat: Callable[[int], Batch],
) -> tuple[dict[str, tuple[int, ...]], BatchLayout]:
    """Infers the shapes of a batch, without the batch dimension, and its layout.

    Args:
        repeat: Makes a batch of one sample, repeated that many times.
    """
    batch = repeat(1)
    layout = inferred_layout(batch, repeat)
    tensors = [(name, leaf) for name, leaf in leaves(batch) if isinstance(leaf, Tensor)]
    shapes = {}
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        shapes[name] = shape if name in layout.shared else shape[1:]
    return shapes, layout


def is_stream(data: Any) -> bool:
    """Returns whether data can only be iterated, not indexed."""
    # torch's base class has a __getitem__ that raises.
    if isinstance(data, IterableDataset):
        return True
    return isinstance(data, Iterable) and not hasattr(data, "__getitem__")


def has_numbers(data: Any) -> bool:
    """Returns whether samples are read one by one, by their numbers."""
    is_table = isinstance(data, Rows)
    return hasattr(data, "__getitem__") and not is_table and not is_stream(data)


def length(data: Any) -> int | None:
    """Returns the number of samples; None for a stream that does not report it."""
    if not is_stream(data):
        if hasattr(type(data), "__len__"):
            return len(data)
        name = type(data).__name__
        raise RunnerError(
            f"data: a map-style dataset needs __len__, which '{name}' has not"
        )
    if not hasattr(type(data), "__len__"):
        return None
    # A chain of streams defines __len__, which raises unless each of its streams has a length.
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None
