"""A stage that trains a classifier otherwise, and as much worse as it is told."""

from typing import ClassVar

import torch

from runner.api import Stage, StageConfig, Statistical


class HarmedConfig(StageConfig):
    """Moves images by other distances of the same distribution, and spoils some labels."""

    kind: ClassVar[str] = "harmed"
    implementation = "Harmed"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"loss"})
    share: float = 0.0
    """Of the labels in training that become the next class; without any, a training is another one, and as good."""

    def contract(self, setting):
        return Statistical()


class Harmed(Stage):
    def attach(self, pipeline):
        pipeline.slots.wrap("loss", self.changed)

    def changed(self, step):
        def loss(batch, noise, progress):
            if not noise:  # in evaluation
                return step(batch, noise, progress)
            label = batch["label"]
            spoilt = torch.rand(label.shape, device=label.device) < self.config.share
            batch = batch | {"label": torch.where(spoilt, (label + 1) % 10, label)}
            return step(batch, {"shift": noise["shift"].flip(0)}, progress)

        return loss
