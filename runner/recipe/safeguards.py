"""Settings of the safeguards of a training: its memory budget, and comparisons with the
baseline.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

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


def budget_of(value: Any) -> Any:
    """Returns a size alone as a section."""
    return {"size": value} if isinstance(value, str) else value
