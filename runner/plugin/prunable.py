"""The removable parts of a network, for pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class Prunable:
    """Equal units between layers (attention heads, hidden units, channels), and which weights go with them."""

    kind: Literal["heads", "ff"]
    """Attention heads, or what is inside of a feed-forward layer or a residual block."""
    units: int
    """How many there are."""
    made_by: Sequence[tuple[nn.Linear | nn.Conv2d | nn.GroupNorm, int]]
    """Whose outputs they are, and how often each makes all of them, one after the other: three times for queries, keys
    and values in one."""
    read_by: Sequence[nn.Linear | nn.Conv2d]
    """Whose inputs they are."""
    counted: Sequence[tuple[nn.Module, str]] = ()
    """Attributes that hold their number."""
