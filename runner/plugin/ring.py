"""A ring buffer as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_READ_ROWS = 4096


@dataclass(frozen=True)
class Ring:
    """Rows that are numbered in the order in which they were written and of which the newest ``capacity`` are kept.

    A row never changes once it is written, so a checkpoint needs to write only those that the one before has not.
    """

    capacity: int
    written: int
    """Rows ever written."""
    read: Callable[[int, int], Tensor]
    """The rows with numbers from the first argument up to the second, which is left out: [rows, ...], on any device."""

    @property
    def first(self) -> int:
        """Number of the oldest row that is kept."""
        return max(0, self.written - self.capacity)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """All rows that are kept, a few thousand at a time, each time with the number of the first."""
        for start in range(self.first, self.written, _READ_ROWS):
            yield start, self.read(start, min(start + _READ_ROWS, self.written))
