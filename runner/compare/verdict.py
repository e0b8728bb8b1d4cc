"""What a gate says, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a comparison came out."""

    PASS = "PASS"  # noqa: S105 (no password)
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """FAIL if anything failed, else INCONCLUSIVE if anything is not clear, else PASS."""
    found = set(outcomes)
    return next((each for each in (Outcome.FAIL, Outcome.INCONCLUSIVE) if each in found), Outcome.PASS)


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as in the baseline."""

    update: int
    """In which update, counted from 1; 0 is before the first."""
    slot: str
    """The named step after which it differs; ``step`` is the whole update."""
    tensor: str
    """An output, a gradient (``NAME.grad``) or a part of the state."""
    absolute: float
    """The largest difference of two elements; infinite where only one is a number, or there is nothing to subtract."""
    relative: float
    """The same as a share of the baseline's largest element."""
    elements: int
    """How many elements differ."""
    remark: str = ""
    """What is wrong where it is not the values: a shape, a type, something missing."""

    def __str__(self) -> str:
        when = f"update {self.update}, slot '{self.slot}'" if self.update else "before the first update"
        where = f"{when}: '{self.tensor}'"
        if self.remark:
            return f"{where} {self.remark}"
        count = f"{self.elements:,} element{'s' if self.elements != 1 else ''}"
        return f"{where} differs by {self.absolute:.2g} ({self.relative:.2g} of its size) in {count}"

    def data(self) -> dict[str, Any]:
        """As JSON can hold it: infinity is the string ``Infinity``."""
        return {name: plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, repr=False)
class Verdict:
    """One gate's judgement; it is true if the gate was passed."""

    outcome: Outcome
    contract: str
    """What was promised: ``Exact``, ``Close``, ``Statistical``, or ``Health``."""
    summary: str
    """One line."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """What the judgement rests on; JSON can hold it."""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return f"{self.outcome} ({self.contract}): {self.summary}"

    __repr__ = __str__  # what an assert shows


def plain(value: Any) -> Any:
    """A number that is not finite as a string, because JSON has none; anything else as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
