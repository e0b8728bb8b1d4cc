"""Verdicts of a gate, with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.proof.reproduction import Reproduction


class Outcome(StrEnum):
    """The outcome of a comparison."""

    PASS = "PASS"  # noqa: S105 (no password)
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Returns FAIL if anything failed, else INCONCLUSIVE if anything is not clear, else PASS."""
    present = set(outcomes)
    for outcome in (Outcome.FAIL, Outcome.INCONCLUSIVE):
        if outcome in present:
            return outcome
    return Outcome.PASS


def excluded(updates: int) -> str:
    """Returns the error rate that updates without an error exclude: the rule of three (Hanley and
    Lippman-Hand, JAMA 1983).
    """
    count = max(1, updates // 3)
    return f"errors more frequent than 1 update in {count:,} are ruled out (95 %)"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The verdict of a gate; it is true for a PASS.

    Attributes:
        outcome: Whether the promise holds.
        contract: The promise: ``Exact``, ``Close``, ``Statistical``, or ``Health``.
        summary: The reason on one line.
        evidence: The evidence for the verdict, in the types of JSON.
        reproduction: How to make the update again in which numbers differ; not stored.
    """

    outcome: Outcome
    contract: str
    summary: str
    evidence: dict[str, Any] = field(default_factory=dict)
    reproduction: Reproduction | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return f"{self.outcome} ({self.contract}): {self.summary}"

    # A failed assertion prints it.
    __repr__ = __str__
