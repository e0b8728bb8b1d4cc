"""A source whose batches have shapes and no data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from runner.plugin.context import Context
from runner.plugin.outline import SourceOutline, TensorOutline
from runner.plugin.source import Batch, Source
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors

_UNLIMITED = 2**30


class OutlinedSource(Source):
    """Draws the largest batch that the outlined source can produce, again and again."""

    def __init__(self, config: Any, context: Context, outline: SourceOutline) -> None:
        self.config = config
        self.device = context.device
        self.outline = outline
        self.sizes = outline.sizes
        self.classes = outline.classes
        self.layout = outline.layout
        self.shapes = {}
        for name, tensor in outline.batch.items():
            if isinstance(tensor, TensorOutline):
                self.shapes[name] = (
                    tensor.shape if name in self.layout.shared else tensor.shape[1:]
                )
        self.tables = outline.make(outline.tables, self._create)
        # Stages put a memory in the place of these.
        self.train: Any = ()
        self.held_out: Any = ()

    def _create(self, outline: TensorOutline) -> Tensor:
        dtype = getattr(torch, outline.dtype)
        if outline.values is None:
            return torch.zeros(outline.shape, dtype=dtype, device=self.device)
        # A learner may read these, which a fake tensor does not allow.
        with unset_fake_temporarily():
            return torch.tensor(outline.values, dtype=dtype).reshape(outline.shape)

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, copy=True)

    def draw(self, batch_size: int, progress: Any) -> Batch:
        """Returns a copy of the example, or a batch of zeros if there is none."""
        if self.outline.example is not None:
            batch: Batch = map_tensors(self._copy, self.outline.example)
            return batch
        return self.outline.make(self.outline.batch, self._create)

    def replace_data(self, train: Any, held_out: Any) -> None:
        """Keeps what a stage puts in the place of the data."""
        self.train = train
        self.held_out = held_out

    def can_balance(self) -> bool:
        """Returns True: a plan draws no samples."""
        return True

    def class_counts(self) -> list[int] | None:
        """Returns one sample for each class: the weights of classes do not change a size."""
        classes = self.sizes.get("classes")
        return None if classes is None else [1] * classes

    def ahead(self) -> int:
        """Returns a large number, as a dataset does."""
        return _UNLIMITED

    def buckets(self, batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """Yields the parts of a batch by the size of its samples, the smallest first.

        Of a batch with fewer samples than the outlined one, they are the largest samples.
        """
        end = self.size(batch)
        parts: list[tuple[Tensor, Batch]] = []
        for outline in reversed(self.outline.buckets or [self.outline.batch]):
            bucket = self.outline.make(outline, self._create)
            start = max(0, end - self.size(bucket))
            if start < end:
                rows = torch.arange(start, end, device=self.device)
                parts.append((rows, self.take(bucket, rows - start)))
            end = start
        yield from reversed(parts)

    def epoch_samples(self, batch_size: int) -> int | None:
        """Returns the samples of an epoch, at least one batch."""
        samples = self.outline.epoch_samples
        return (
            None
            if samples is None
            else max(batch_size, samples // batch_size * batch_size)
        )

    def evaluate(self, learner: Any) -> dict[str, float]:
        """Raises an error, because a plan has no data."""
        raise RunnerError("a plan has no data to evaluate on")


def outlined(outline: SourceOutline) -> Callable[[Any, Context], Source]:
    """Returns what builds the source."""

    def build(config: Any, context: Context) -> Source:
        return OutlinedSource(config, context, outline)

    return build


def outline_of_batch(source: Source, batch: Mapping[str, Any]) -> SourceOutline:
    """Returns the outline of a source that was built, with a batch that it produced."""

    def describe(tensor: Tensor) -> TensorOutline:
        return TensorOutline(
            tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        )

    return SourceOutline(
        map_tensors(describe, batch),  # type: ignore[arg-type]  # what takes a tensor's place
        sizes=dict(source.sizes),
        tables=map_tensors(describe, dict(source.tables)),  # type: ignore[arg-type]
        classes=tuple(source.classes),
        layout=source.layout,
        epoch_samples=source.epoch_samples(source.size(batch)),
        example=batch,
    )
