"""Settings with which a stage saves memory, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryChoice:
    """Settings with which a stage saves memory.

    Attributes:
        settings: Of the stage; those that are not named have their defaults.
        time: Expected time of an update, as a multiple of that without the stage.
        cost: What it costs, for a person.
    """

    settings: Mapping[str, Any]
    time: float
    cost: str
