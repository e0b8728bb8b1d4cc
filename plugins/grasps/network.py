"""The networks of learners of grasps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .decoder import SetTransformer
from .encoder import ENCODERS
from .geometry import HAND, JOINTS, LIMITS, ROTATION, TRANSLATION, Hand

if TYPE_CHECKING:
    from .config import GraspLearnerConfig

NUMBERS = 25
"""Numbers that describe a grasp."""
SCALE = 0.05
"""Metres; about half of an object's size."""
PARTS = {
    "translation": (TRANSLATION, 20.0),
    "rotation": (ROTATION, 20.0),
    "joints": (JOINTS, 1.0),
}
"""Numbers of a grasp, and the fixed weights of their errors."""


class GraspNetwork(nn.Module):
    """An encoder of clouds and a transformer that makes sets of grasps, with the tables of the
    hand.
    """

    def __init__(
        self,
        config: GraspLearnerConfig,
        inputs: int,
        tables: Mapping[str, Tensor],
        outputs: int = NUMBERS,
    ) -> None:
        super().__init__()
        self.encoder = ENCODERS[config.encoder](config.width, SCALE)
        self.transformer = SetTransformer(
            inputs, outputs, config.width, config.layers, config.heads
        )
        # Zeros: no random number is drawn, and the weights start as the fixed ones.
        self.log_variances: nn.ParameterDict | None = None
        if config.task_weights == "learned":
            self.log_variances = nn.ParameterDict(
                {name: torch.zeros(()) for name in PARTS}
            )
        self.hand = Hand({name: tables[name] for name in (*HAND, *LIMITS)})
        self.lower: Tensor
        self.upper: Tensor
        self.register_buffer("lower", tables["lower"].clone())
        self.register_buffer("upper", tables["upper"].clone())

    def metric(self, scaled: Tensor) -> Tensor:
        """Returns grasps in metres and radians from those scaled to [-1, 1]."""
        return self.lower + (scaled + 1) / 2 * (self.upper - self.lower)

    def scaled(self, metric: Tensor) -> Tensor:
        """Returns the inverse of ``metric``."""
        return (metric - self.lower) / (self.upper - self.lower) * 2 - 1


class DiffusionNetwork(GraspNetwork):
    """A network that removes noise from vectors, with tokens that represent a missing cloud."""

    def __init__(
        self,
        config: GraspLearnerConfig,
        tables: Mapping[str, Tensor],
        numbers: int = NUMBERS,
    ) -> None:
        super().__init__(config, numbers, tables, numbers)
        self.no_cloud = nn.Parameter(0.02 * torch.randn(config.width))

    def forward(self, noisy: Tensor, tokens: Tensor, time: Tensor) -> Tensor:
        """Returns the predicted clean vectors for noisy ones [B, G, numbers], which are scaled
        grasps by default, with tokens [B, M, width], at times [B] in [0, 1].
        """
        answer: Tensor = self.transformer(noisy, tokens, time)
        return answer
