"""A baseline and a candidate without recipes, and the base class of their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from runner.plugin.check import PairCheck
from runner.plugin.contract import Close, Exact
from runner.proof.subject import Build
from runner.proof.verdict import Verdict

FRESH = "parameters that change between steps take effect"
HEALTH = "Health"
"""Contract of verdicts on gradients and on steps that fail."""


@dataclass
class SubjectPair:
    """Two training steps, and the results of their checks.

    Attributes:
        baseline: Makes the reference.
        candidate: Makes the same with the change.
        batches: One for each update.
        contract: The promise of the change.
        seed: Of the global random generators.
        compiled_before: Number of graphs that the process had compiled before the first check.
        results: The checks that were run, in their order.
    """

    baseline: Build
    candidate: Build
    batches: Sequence[Any]
    contract: Exact | Close
    seed: int = 0
    compiled_before: int = 0
    results: list[tuple[SubjectCheck, Verdict]] = field(default_factory=list)

    @property
    def promise_name(self) -> str:
        """Returns the name of the contract."""
        return type(self.contract).__name__

    @property
    def is_close(self) -> bool:
        """Returns whether rounding may differ."""
        return isinstance(self.contract, Close)

    @property
    def is_kept(self) -> bool:
        """Returns whether all checks so far have passed."""
        return all(verdict for _, verdict in self.results)

    @property
    def evidence(self) -> dict[str, Any]:
        """Returns the evidence of all checks so far."""
        return {
            name: value
            for _, verdict in self.results
            for name, value in verdict.evidence.items()
        }


class SubjectCheck(PairCheck):
    """A question about a change of a training step without a recipe."""

    judges_contract: ClassVar[bool] = True
    """Whether its verdict is one on the contract; later checks of this kind run only after
    a PASS.
    """


class Unlimited:
    """A time budget without a limit."""

    def at_most(self, seconds: float) -> float:
        """Returns these seconds."""
        return seconds
