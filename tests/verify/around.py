"""Stages that leave the update alone and harm what is around it."""

from typing import Any, ClassVar

import torch

from runner.api import Close, Exact, Stage, StageConfig
from runner.system.tree import map_tensors

HARMS = ("alone", "when_evaluated", "while_training", "evaluation", "fewer", "noise", "counts", "draws_more", "moved")


class AroundConfig(StageConfig):
    """Takes hold of the forward, the transfer and the drawing."""

    kind: ClassVar[str] = "around"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"forward", "next_batch", "transfer"})

    harm: str = ""
    """What it does beyond calling them."""
    promise: str = "exact"
    """What it says."""

    def contract(self, setting):
        return Exact() if self.promise == "exact" else Close()

    def implementation(self):
        return Around


class Around(Stage):
    """Harms."""

    def attach(self, pipeline: Any) -> None:
        source, learner, harm = pipeline.source, pipeline.learner, self.config.harm
        for name in ("forward", "next_batch", "transfer"):
            pipeline.slots.wrap(name, lambda step, name=name: lambda *given: self.changed(name, step(*given)))
        self.module, self.harm = learner.module, harm
        if harm == "evaluation":
            evaluate = source.evaluate
            source.evaluate = lambda learner: {name: 0.99 * value for name, value in evaluate(learner).items()}
        if harm == "counts":
            counts = source.counts
            source.counts = lambda batch: {unit: 2 * number for unit, number in counts(batch).items()}
        if harm == "noise":
            noise = learner.noise
            learner.noise = lambda batch, generator: {**noise(batch, generator), "more": torch.zeros(1)}
        if harm == "draws_more":
            generator = pipeline.learner.context.generator("noise")
            noise = learner.noise
            learner.noise = lambda batch, given: (torch.rand(1, generator=generator), noise(batch, given))[1]

    def changed(self, name: str, output: Any) -> Any:
        if name == "forward" and not torch.is_grad_enabled():
            wrong = self.harm == "alone" and len(output) == 1
            wrong |= self.harm == "when_evaluated" and not self.module.training
            wrong |= self.harm == "while_training" and self.module.training
            return 1.01 * output if wrong else output
        if name == "next_batch" and self.harm == "fewer":
            return map_tensors(lambda tensor: tensor[:-1], output)
        if name == "transfer" and self.harm == "moved":
            return map_tensors(lambda tensor: (tensor + 1) % 3, output)
        return output
