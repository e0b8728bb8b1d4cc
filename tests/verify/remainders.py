"""A stage that computes blocks of columns, and is wrong about an incomplete last block."""

from typing import Any, ClassVar, Literal

import torch

from runner.api import Exact, Stage, StageConfig


class RemaindersConfig(StageConfig):
    """Computes complete blocks."""

    kind: ClassVar[str] = "remainders"
    implementation = "Remainders"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset({"forward"})

    block: int = 4
    """Columns of a block."""
    harm: Literal["nothing", "zeros", "repeated", "flipped", "scaled"] = "nothing"
    """Results of the columns after the last complete block."""
    mode: Literal["always", "training", "predicting"] = "always"
    """Whether gradients matter for the harm."""

    def contract(self, setting):
        return Exact()


class Remainders(Stage):
    """Changes the columns of the forward after the last complete block."""

    def attach(self, pipeline: Any) -> None:
        pipeline.slots.wrap("forward", lambda step: lambda symbols: self.changed(step(symbols)))

    def changed(self, output: Any) -> Any:
        complete = output.shape[1] // self.config.block * self.config.block
        if self.config.mode == ("predicting" if torch.is_grad_enabled() else "training"):
            return output
        remainder = output[:, complete:]
        changes = {
            "nothing": remainder,
            "zeros": torch.zeros_like(remainder),
            "repeated": output[:, :1].expand_as(remainder),
            "flipped": remainder.flip(-1),
            "scaled": 1.5 * remainder,
        }
        return torch.cat([output[:, :complete], changes[self.config.harm]], 1)
