"""Compares evaluations, and updates between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.proof.verdict import Outcome, Verdict, worst
from runner.verify.evaluation_checks import answers, same_evaluations
from runner.verify.options import UPDATES_BETWEEN_EVALUATIONS

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class EvaluationsCheck(Check):
    """Compares evaluations of all held-out samples and of parts of them, with updates
    and a changed state between.
    """

    name = "evaluations"
    question = "Does an evaluation measure the same, and leave the training as it was?"
    catches = (
        "another metric; a last batch that is padded or left out; a later evaluation, or "
        "a part of it, that is an earlier one's; an evaluation that changes parameters, "
        "statistics, held-out samples or later updates, also if it is interrupted"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive, and for ``Statistical`` ones."""
        return not pair.is_inactive and isinstance(pair.contract, Exact | Close)

    def cost(self, pair: StagePair) -> str:
        """Returns the number of evaluations and updates."""
        updates = UPDATES_BETWEEN_EVALUATIONS + 1
        precision = (
            " in float64, one in float32" if isinstance(pair.contract, Close) else ""
        )
        few = "one is interrupted, and up to 4 measure a few samples"
        return f"4 evaluations{precision}, {updates} updates; {few}"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares evaluations by bits or algebra, and one by its rounding."""
        contract = pair.contract
        assert isinstance(contract, Exact | Close)
        baseline, candidate = pair.builds(answers)
        name = type(contract).__name__
        summary = "nothing of it can be evaluated, in the baseline either"
        verdict = Verdict(Outcome.PASS, name, summary)
        for result in same_evaluations(
            pair.baseline.evaluated,
            baseline,
            candidate,
            pair.baseline.evaluations,
            contract,
        ):
            # The last of several PASSes is returned, and the first that is worse.
            outcome = worst([verdict.outcome, result.outcome])
            if verdict or outcome is not verdict.outcome:
                verdict = result
            if verdict.outcome is Outcome.FAIL:
                break
        return verdict
