"""Shapes of the batches of a source, without its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.system.tensor_trees import BatchLayout, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class TensorOutline:
    """Shape and type of a tensor that does not exist yet.

    Attributes:
        shape: Its dimensions, with that of the batch.
        dtype: Name of a type of torch (``float32``, ``int64``, ``bool``).
        values: Its numbers, flat, if a learner reads them when it is built; None if only shapes
            count.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    values: tuple[int | float, ...] | None = None


@dataclass(frozen=True)
class SourceOutline:
    """The information on a source that building a learner needs, and the largest batch
    of the source.

    Attributes:
        batch: The tree of a batch, with a ``TensorOutline`` for each tensor.
        largest: Which batch that is, for a person; empty if all batches have the same shapes.
        buckets: Outlines of the parts into which ``Source.buckets`` cuts that batch, the smallest
            samples first; empty if they are as large as one another.
        sizes: As ``Source.sizes``.
        tables: As ``Source.tables``, with a ``TensorOutline`` for each tensor.
        classes: As ``Source.classes``.
        layout: As ``Source.layout``.
        epoch_samples: Samples of an epoch; None if the data have no epochs.
        example: A batch of the source, for updates that read its numbers; None has only zeros.
    """

    batch: Mapping[str, Any]
    largest: str = ""
    buckets: Sequence[Mapping[str, Any]] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, TensorOutline] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    layout: BatchLayout = field(default_factory=BatchLayout)
    epoch_samples: int | None = None
    example: Any = field(default=None, compare=False, repr=False)

    def make(self, tree: Any, create: Callable[[TensorOutline], Tensor]) -> Any:
        """Returns a tree with a tensor in the place of each outline."""
        return map_leaves(create, tree, (TensorOutline,))
