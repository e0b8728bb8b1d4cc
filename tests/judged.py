"""Sources whose ``evaluate`` measures more than the learner: ``--plugin`` takes this file after ``toys.py``."""

from typing import ClassVar

import torch
from toys import Words, WordsConfig

from runner.api import Objective


class JudgedConfig(WordsConfig):
    """Sentences, and how far the worst guess is off."""

    kind: ClassVar[str] = "toy_judged"
    implementation = "Judged"
    objective: ClassVar[Objective | None] = Objective("worst", "minimize")

    scale: float = 1.0
    """Factor that only ``evaluate`` reads."""
    judge: str = "batches"
    """Whether it measures batches, or all samples together, or makes a mistake."""


class Judged(Words):
    def datasets(self, config):
        self.seen = []
        return super().datasets(config)

    def evaluate(self, learner):
        guesses = [learner.predict(learner.inputs(batch)) for batch in self.held_out_batches()]
        self.seen.append(len(guesses))
        guess = torch.cat(guesses)
        if self.config.judge == "all":
            index = torch.arange(len(self.held_out))
            guess = guess - self.held_out.take(index)["words"].float().mean(1)[:, None, None]
        if self.config.judge == "mistake":
            guess.no_such_method()
        own = {"worst": self.config.scale * guess.abs().max().item()}
        return self.with_own_metrics(learner, super().evaluate(learner), own)
