"""Compares the slots that stages attach to with those that their configs declare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.verdict import Verdict

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class DeclaredSlotsCheck(Check):
    """Compares the slots that stages attach to with those that they declare."""

    name = "declared slots"
    question = "Does each stage attach only to the slots that its config declares?"
    catches = (
        "a stage that changes a step which nobody expects it to change, and conflicts "
        "that stay hidden"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive."""
        return not pair.is_inactive

    def cost(self, pair: StagePair) -> str:
        """Returns that it reads what was recorded when pipelines were built."""
        return "nothing: recorded when the pipeline is built"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Reports the first undeclared slot."""
        for kind in pair.stages:
            for slot in pair.undeclared.get(kind, ()):
                return pair.failed(
                    f"'{kind}' attaches to the slot '{slot}', "
                    "which its config does not declare (wraps, claims)"
                )
        return pair.passed("all slots are declared")
