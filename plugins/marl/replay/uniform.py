"""Uniform replay."""

import torch

from runner.api import Batch

from .buffer import Replay


class UniformReplay(Replay):
    """Draws every transition with the same probability and gives all of them weight 1."""

    def draw(self, batch_size: int, progress: float) -> Batch:
        """Returns the places of the transitions; see ``Replay.draw``."""
        self._require_transitions()
        index = torch.randint(
            len(self),
            (batch_size,),
            generator=self.generator,
            device=self.device,
        )
        return {"index": index}

    def fetch(self, drawn: Batch) -> Batch:
        """Returns the transitions at these places; see ``Replay.fetch``."""
        index = drawn["index"]
        weight = torch.ones(len(index), device=self.device)
        return {**self._take(index), "index": index, "weight": weight}
