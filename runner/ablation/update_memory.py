"""Memory of one update, as it was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of the largest of several updates.

    Attributes:
        update: What an update holds at its peak beyond the state: gradients, activations and
            temporaries. On a CUDA device it is what the allocator reports, on a CPU what the
            tracker does, and the growth of the process where compiled code allocates.
        saved: Largest number of bytes held for backward.
        tracked: The update's memory as the tracker counts it; None where code is compiled.
        grown: The growth of the process; None on a device, and where the kernel has no figures.
        state: Bytes of all tensors between two updates, without gradients.
    """

    update: int
    saved: int
    tracked: int | None
    grown: int | None
    state: int

    @property
    def disagreement(self) -> float | None:
        """Relative difference between the two independent CPU measurements."""
        if not self.tracked or not self.grown:
            return None
        return abs(self.tracked - self.grown) / max(self.tracked, self.grown)
