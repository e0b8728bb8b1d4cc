"""The removable parts of a network, for pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class Prunable:
    """Equal units between layers (attention heads, hidden units, channels), and which weights go
    with them.
    """

    kind: Literal["heads", "ff"]
    """Attention heads, or what is inside of a feed-forward layer or a residual block."""
    units: int
    """Number of units."""
    made_by: Sequence[tuple[nn.Linear | nn.Conv2d | nn.GroupNorm, int]]
    """Layers whose outputs are the units, each with the number of times that its outputs contain
    all of them: three for queries, keys and values in one layer.
    """
    read_by: Sequence[nn.Linear | nn.Conv2d]
    """Layers whose inputs are the units."""
    counted: Sequence[tuple[nn.Module, str]] = ()
    """Attributes with the number of units."""
