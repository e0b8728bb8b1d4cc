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
    """FAIL if anything failed, else INCONCLUSIVE if anything is not clear, else PASS."""
    found = set(outcomes)
    return next((each for each in (Outcome.FAIL, Outcome.INCONCLUSIVE) if each in found), Outcome.PASS)


def excluded(updates: int) -> str:
    """Returns the error rate that updates without an error exclude: the rule of three (Hanley and
    Lippman-Hand, JAMA 1983).
    """
    return f"errors more frequent than 1 update in {max(1, updates // 3):,} are ruled out (95 %)"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The verdict of a gate; it is true for a PASS."""

    outcome: Outcome
    contract: str  # the promise: ``Exact``, ``Close``, ``Statistical``, or ``Health``
    summary: str  # one line
    # The evidence for the verdict, in the types of JSON.
    evidence: dict[str, Any] = field(default_factory=dict)
    reproduction: Reproduction | None = field(default=None, compare=False)
    """How to make the update again in which numbers differ; not stored."""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return f"{self.outcome} ({self.contract}): {self.summary}"

    __repr__ = __str__  # printed by an assert
