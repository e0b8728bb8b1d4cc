"""Starts of failed episodes, which some of the next episodes repeat."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.api import State

CAPACITY = 64
"""Starts that are stored; a new one replaces the oldest."""


class FailedStarts:
    """Mixes the starts of recent failed episodes into new starts.

    Late in a training few episodes fail, and nearly all failures have similar starts. A
    uniform distribution of starts then shows the learner few situations that it cannot
    master yet (prioritized level replay, Jiang et al. 2021, arXiv 2010.03934). No
    operation waits for the device.
    """

    def __init__(
        self, share: float, start: Tensor, generator: torch.Generator
    ) -> None:
        """Creates an empty store.

        Args:
            share: Probability that a new episode repeats a stored start, 0 to 1.
            start: [E, A, 4], starts of the running episodes.
            generator: Selects which episodes repeat which start; on the same device.
        """
        self._share = share
        self._running = start.clone()
        self._generator = generator
        # Starts of episodes that did not fail are written to the last row.
        self._stored = start.new_zeros(CAPACITY + 1, *start.shape[1:])
        self._count = torch.zeros((), dtype=torch.int64, device=start.device)

    def replace(self, start: Tensor) -> Tensor:
        """Returns new starts [E, A, 4], some of them replaced by stored ones."""
        uniform = torch.rand(
            2,
            len(start),
            generator=self._generator,
            dtype=torch.float32,
            device=start.device,
        )
        size = self._count.clamp(max=CAPACITY)
        row = (uniform[0] * size).long().clamp(max=CAPACITY - 1)
        repeats = (uniform[1] < self._share) & (size > 0)
        return torch.where(repeats.view(-1, 1, 1), self._stored[row], start)

    def end(self, ended: Tensor, failed: Tensor, start: Tensor) -> None:
        """Stores the starts of episodes that failed, and records those that start.

        Args:
            ended: [E], bool.
            failed: [E], bool, only where an episode ended.
            start: [E, A, 4], starts of the next episodes.
        """
        # Failed episodes get consecutive positions; all others are written to the last row,
        # because a selection by a mask would wait for the device.
        position = (self._count + failed.cumsum(0) - 1) % CAPACITY
        row = torch.where(failed, position, CAPACITY)
        self._stored.index_copy_(0, row, self._running)
        self._count += failed.sum()
        is_over = ended.view(-1, 1, 1)
        torch.where(is_over, start, self._running, out=self._running)

    def state_dict(self) -> State:
        """Returns the stored starts and those of the running episodes."""
        return {
            "running": self._running.clone(),
            "stored": self._stored.clone(),
            "count": self._count.clone(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        device = self._running.device
        # As many simulations as in the state.
        self._running = state["running"].to(device, copy=True)
        self._stored.copy_(state["stored"])
        self._count.copy_(state["count"])
