"""Uniform replay."""

import torch

from runner.api import Batch

from .buffer import Replay


class UniformReplay(Replay):
    """Draws every transition with the same probability and gives all of them weight 1."""

    def sample(self, batch_size: int, progress: float) -> Batch:
        """Draws transitions with replacement; see ``Replay.sample``."""
        self._require_transitions()
        index = torch.randint(
            len(self),
            (batch_size,),
            generator=self.generator,
            device=self.device,
        )
        return {
            **self._take(index),
            "index": index,
            "weight": torch.ones(batch_size, device=self.device),
        }
