"""Learners whose losses depend on progress and noise: a plugin file for tests."""

from typing import ClassVar

import torch
from toys import Pair, PairConfig, Toy, ToyConfig

from runner.api import Loss, Mean, Objective


class AnnealedConfig(ToyConfig):
    """Adds the share of the training that is over to the loss."""

    kind: ClassVar[str] = "toy_annealed"
    rise: float = 100.0
    """By how much the loss of a word is larger at the end."""

    def implementation(self):
        return Annealed


class Annealed(Toy):
    def noise(self, batch, generator):
        return {"number": torch.rand((), generator=generator)}

    def loss(self, batch, noise, progress):
        total, count, _ = super().loss(batch, noise, progress)
        also = {"fraction": Mean(progress.fraction, 1), "number": Mean(noise["number"], 1)}
        return Loss(total + self.config.rise * progress.fraction * count, count, also)


class AnnealedPairConfig(PairConfig):
    """Two networks with the same metrics."""

    kind: ClassVar[str] = "toy_annealed_pair"
    objective: ClassVar[Objective | None] = Objective("fraction", "minimize", 0.1, "share")

    def implementation(self):
        return AnnealedPair


class AnnealedPair(Pair):
    def metrics(self, batch):
        number = self.held_out_noise(batch)["latent"].sum()
        return {"fraction": Mean(self.context.progress.fraction, 1), "number": Mean(number, 1)}
