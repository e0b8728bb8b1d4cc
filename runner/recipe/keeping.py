"""Settings of the checkpoints that stay."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from runner.plugin.config import Config
from runner.plugin.contract import Objective

Direction = Literal["minimize", "maximize"]
FEWEST = 2
"""Newest checkpoints that stay at least, because the newest may be damaged."""


class KeepConfig(Config):
    """Selects the checkpoints of a training that stay."""

    last: Annotated[int, Field(ge=FEWEST)] = FEWEST
    """Newest checkpoints that stay; at least two, because the newest may be damaged."""
    best: Annotated[int, Field(ge=1)] = 1
    """Checkpoints that stay for each metric, those with its best values."""
    metrics: dict[Annotated[str, Field(pattern=r"^eval/\S+$")], Direction] = Field(
        default_factory=dict
    )
    """Metrics, such as eval/loss, each with its direction; none is the objective alone. The
    checkpoint with the best objective stays in any case.
    """

    def directions(self, objective: Objective | None) -> Mapping[str, Direction]:
        """Returns the metrics that are compared, without ``eval/``, with their directions.

        Args:
            objective: That of the recipe.
        """
        directions = {
            name.removeprefix("eval/"): direction
            for name, direction in self.metrics.items()
        }
        # Whoever names metrics may leave the objective out.
        if not directions and objective is not None:
            directions = {objective.name: objective.direction}
        return MappingProxyType(directions)
