"""Settings of the safeguards of a training: its memory budget, comparisons with the baseline, and
numbers that are not finite.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from runner.plugin.config import Config
from runner.system.byte_size import parse_size


class MemoryBudgetConfig(Config):
    """Memory that an update may take."""

    size: str
    """Bytes with a unit, such as 6GiB or 800 MB; a training is refused whose plan exceeds them."""
    fit: bool = False
    """Whether stages that save memory are switched on until the plan fits, the fastest first."""

    @field_validator("size")
    @classmethod
    def _is_a_size(cls, size: str) -> str:
        parse_size(size)
        return size

    @property
    def limit(self) -> int:
        """The size in bytes."""
        return parse_size(self.size)


class SentinelConfig(Config):
    """Verification of updates during a training."""

    share: Annotated[float, Field(gt=0, le=0.5)] = 0.01
    """Share of the time that it may take."""
    on_alarm: Literal["stop", "mark"] = "stop"
    """Whether an alarm stops the run at its last checkpoint, or only marks it."""


class NonfiniteConfig(Config):
    """The reaction to an update whose loss or gradients are not finite."""

    action: Literal["stop", "skip"] = "stop"
    """Whether the training is stopped, or continues without the update."""
    at_most: Annotated[int, Field(ge=1)] = 10
    """Number of skipped updates of a training; one more stops it."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> NonfiniteConfig:
        if self.action == "stop" and "at_most" in self.model_fields_set:
            is_default = self.at_most == type(self).model_fields["at_most"].default
            if not is_default:
                raise ValueError("at_most has no effect with action: stop; remove it")
        return self


def nonfinite_of(value: Any) -> Any:
    """Returns an action alone as a section."""
    return {"action": value} if isinstance(value, str) else value


def budget_of(value: Any) -> Any:
    """Returns a size alone as a section."""
    return {"size": value} if isinstance(value, str) else value
