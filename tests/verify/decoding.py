"""Stages that leave training and evaluation alone and harm generation."""

from typing import Any, ClassVar

import torch

from runner.api import Exact, Stage, StageConfig


class DecodingConfig(StageConfig):
    """Changes what a language model writes."""

    kind: ClassVar[str] = "decoding"
    implementation = "Decoding"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})

    harm: str = ""
    """What it does beyond calling the model."""

    def contract(self, setting):
        return Exact()


class Decoding(Stage):
    """Wraps the forward and the writing of a language model."""

    def attach(self, pipeline: Any) -> None:
        learner = pipeline.learner
        self.harm = self.config.harm
        self.write = learner.write
        pipeline.slots.wrap("forward", lambda step: lambda symbols: self.forward(step, symbols))
        learner.write = self.written

    def forward(self, step: Any, symbols: Any) -> Any:
        if torch.is_grad_enabled() or len(symbols) > 1:
            return step(symbols)
        if self.harm == "first_symbol" and symbols.shape[1] == 1:
            return step(symbols).flip(-1)
        if self.harm == "one_more_than_trained" and symbols.shape[1] == 16:
            return step(symbols.roll(1, 1))
        return step(symbols)

    def written(self, prompt: Any, draws: Any, temperature: Any = 1.0) -> Any:
        if self.harm == "temperature":
            return self.write(prompt, draws, 10.0)
        symbols = self.write(prompt, draws, temperature)
        if self.harm == "count" and symbols.shape[1] > 2:
            symbols[:, 2:] = symbols[:, :1]
        return symbols
