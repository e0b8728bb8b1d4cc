"""Drawing from a large discrete distribution whose masses change all the time."""

import torch
from torch import Tensor

BLOCK = 64
# Rounding in float64 of a fraction times a total moves it by less than this share, so that no
# fraction reaches the end.
BELOW_ONE = 1 - 2.0**-50


class BlockSums:
    """Integer masses of many slots, and their sums over blocks of neighbours.

    A draw looks for its block among the cumulative sums of all blocks, then for its slot among
    the cumulative masses of that block. For n slots that is n / 64 + 64 additions a draw at most,
    in a fixed and small number of tensor operations, where a binary tree takes log2(n) rounds of
    them.

    Masses are integers because sums of integers are exact in any order: nothing drifts however
    often masses change, a draw can never end in a slot without mass, and a GPU finds the same
    slots every time.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        blocks = -(-slots // BLOCK)
        self.masses = torch.zeros(
            blocks * BLOCK, dtype=torch.int64, device=device
        )
        """Mass of every slot; the caller keeps their total below 2^63."""
        self._rows = self.masses.view(blocks, BLOCK)
        self._sums = torch.zeros(blocks, dtype=torch.int64, device=device)
        self._cumulative = torch.zeros(
            blocks + 1, dtype=torch.int64, device=device
        )
        self._ends = self._cumulative[1:]

    def set(self, index: Tensor, masses: Tensor) -> None:
        """Replaces the masses of the slots at ``index``; of several for one slot the largest
        stays, on every device.
        """
        self.masses.scatter_reduce_(
            0, index, masses, "amax", include_self=False
        )
        block = index // BLOCK
        self._sums.index_copy_(
            0, block, self._rows.index_select(0, block).sum(1)
        )

    def find(self, fractions: Tensor) -> Tensor:
        """Returns the slots at these fractions of the total mass.

        A slot is the first whose cumulative mass is greater.

        Args:
            fractions: In [0, 1], [B], float64; 1 represents the largest fraction below it.

        Returns:
            Slots, [B]; a slot of mass m of a total of M holds m / M of all fractions, one of mass
            0 none.
        """
        # The sums of the blocks change with every update, so they are added up for each draw.
        torch.cumsum(self._sums, 0, out=self._ends)
        target = (fractions * BELOW_ONE).mul_(self._ends[-1]).long()
        block = torch.searchsorted(self._ends, target, right=True)
        target -= self._cumulative.index_select(0, block)
        within = self._rows.index_select(0, block).cumsum(1)
        slot = torch.searchsorted(
            within, target.unsqueeze(1), right=True
        ).squeeze(1)
        return block.mul_(BLOCK).add_(slot)

    def total(self) -> Tensor:
        """Returns the sum of all masses at the last ``find``."""
        return self._ends[-1]

    def load(self, masses: Tensor) -> None:
        """Sets the first slots to ``masses`` and all others to zero."""
        self.masses.zero_()[: len(masses)].copy_(masses)
        torch.sum(self._rows, 1, out=self._sums)
