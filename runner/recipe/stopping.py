"""Settings of conditions that end a training before its length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from runner.plugin.config import Config
from runner.plugin.contract import Objective
from runner.plugin.watched_metric import Direction, watched_metric

CONDITIONS = ("patience", "reach", "seconds")
"""The settings of which a recipe has exactly one."""
Count = Annotated[int, Field(ge=1)]


class StopConfig(Config):
    """Ends a training before its length, by one of ``patience``, ``reach`` and ``seconds``."""

    patience: Count | None = None
    """Evaluations without an improvement after which the training ends."""
    reach: float | None = None
    """Value of the metric at which the training ends."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of training after which it ends, those before an interruption included."""
    metric: Annotated[str, Field(pattern=r"^eval/\S+$")] | None = None
    """The metric of ``patience`` or ``reach``, such as eval/loss; null is the objective."""
    direction: Direction | None = None
    """Whether less or more of the metric is better; null is the objective's direction."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Least difference to the best value that is an improvement; a tie is none."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the earlier evaluations in the moving average that is compared; 0 compares the
    values themselves.
    """
    not_before: Annotated[int, Field(ge=0)] = 0
    """Length in the training's unit before which it does not end."""

    @model_validator(mode="after")
    def _has_one_condition(self) -> StopConfig:
        conditions = [name for name in CONDITIONS if getattr(self, name) is not None]
        if len(conditions) != 1:
            actual = " and ".join(conditions) or "none of them"
            raise ValueError(
                f"set exactly one of {', '.join(CONDITIONS)}; got {actual}"
            )
        return self

    def watched(self, objective: Objective | None) -> tuple[str, Direction] | None:
        """Returns the metric that is compared, without ``eval/``, and its direction.

        Returns None if time alone decides, or if metric or direction are unknown.

        Args:
            objective: That of the recipe.
        """
        if self.seconds is not None:
            return None
        return watched_metric(self.metric, self.direction, objective)
