"""A learner with bad batches, for tests: ``--plugin`` takes this file."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.api import GradientLearner, GradientLearnerConfig, Loss, Objective

WORDS = 16


class PoisonedConfig(GradientLearnerConfig):
    """Guesses the next word, and has numbers that are not finite in some updates."""

    kind: ClassVar[str] = "poisoned"
    implementation = "Poisoned"
    learns_from: ClassVar[str] = "toy_words"
    objective: ClassVar[Objective | None] = Objective("loss", "minimize", 0.1, "nats")

    bad: tuple[int, ...] = (3, 7)
    """Numbers of updates before the bad ones."""
    what: str = "loss"
    """The number that is not finite: the loss, or a gradient alone."""


class Poisoned(GradientLearner):
    def build(self, config, shapes, context):
        self.spoils_loss = config.what == "loss"
        layers = (nn.Embedding(WORDS, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, WORDS))
        return nn.Sequential(*layers)

    def loss(self, batch, noise, progress):
        words, following = batch["words"][:, :-1], batch["words"][:, 1:]
        loss = cross_entropy(self.slots.forward(words), following.flatten(), reduction="sum")
        if self.module.training and progress.updates in self.config.bad:
            zero = 0 * self.module[3].weight.sum()
            # The root of zero is zero, and its derivative is infinite.
            loss = loss * torch.nan if self.spoils_loss else loss + zero.sqrt()
        return Loss(loss, following.numel())
