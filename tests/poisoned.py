"""A learner with bad batches, for tests: ``--plugin`` takes this file."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from runner.api import GradientLearner, GradientLearnerConfig, Loss, Mean, Objective

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
    """The number that is not finite: the loss, a gradient alone, or a metric (``nan`` or ``inf``)."""


class Statistics(nn.Module):
    """Counts its calls and averages its input, in buffers that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
            mean = x.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return x


class Poisoned(GradientLearner):
    def build(self, config, shapes, context):
        layers = (nn.Embedding(WORDS, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, WORDS))
        return nn.Sequential(*layers, Statistics())

    def loss(self, batch, noise, progress):
        words, following = batch["words"][:, :-1], batch["words"][:, 1:]
        loss = cross_entropy(self.slots.forward(words), following.flatten(), reduction="sum")
        if self.module.training and progress.updates in self.config.bad:
            if self.config.what == "gradient":
                # The root of zero is zero, and its derivative is infinite.
                zero = 0 * self.module[3].weight.sum()
                loss = loss + zero.sqrt()
            elif self.config.what == "loss":
                loss = loss * torch.nan
        if self.config.what not in ("nan", "inf"):
            return Loss(loss, following.numel())
        is_bad = self.module.training and progress.updates in self.config.bad
        metric = torch.tensor(float(self.config.what) if is_bad else 1.0)
        return Loss(loss, following.numel(), {"rare": Mean(metric, 1)})


class CarryingConfig(PoisonedConfig):
    """Keeps numbers between batches, in attributes that are in its state."""

    kind: ClassVar[str] = "carrying"
    implementation = "Carrying"
    in_place: bool = False


class Carrying(Poisoned):
    carry: Any = None

    def loss(self, batch, noise, progress):
        loss = super().loss(batch, noise, progress)
        if not self.module.training:
            return loss
        if self.carry is None:
            self.carry = {"mean": torch.zeros(()), "calls": [0]}
        mean = 0.5 * self.carry["mean"].detach() + loss.sum / loss.count
        if self.config.in_place:
            self.carry["mean"].copy_(mean.detach())
            self.carry["calls"][0] += 1
        else:
            self.carry = {"mean": mean.detach(), "calls": [self.carry["calls"][0] + 1]}
        return loss._replace(sum=loss.sum + mean)

    def state_dict(self):
        return super().state_dict() | {"carry": self.carry}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.carry = state["carry"]
