"""Ring buffers in a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_READ_ROWS = 4096


@dataclass(frozen=True)
class Ring:
    """A ring buffer in a state: rows numbered in the order of writing; only the newest
    ``capacity`` exist.

    A row never changes once it is written, so a checkpoint needs to write only those that the one
    before has not.
    """

    capacity: int
    written: int
    """Rows ever written."""
    read: Callable[[int, int], Tensor]
    """Returns the rows from the first number up to the second, which is excluded: [rows, ...], on
    any device.
    """

    @property
    def first(self) -> int:
        """Number of the oldest row that exists."""
        return max(0, self.written - self.capacity)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yields all existing rows in pieces of a few thousand, each with the number of
        its first row.
        """
        # In pieces, because a copy of a large ring may not fit into memory.
        for start in range(self.first, self.written, _READ_ROWS):
            yield start, self.read(start, min(start + _READ_ROWS, self.written))
