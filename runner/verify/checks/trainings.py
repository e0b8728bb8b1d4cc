"""Compares what trainings learn, with paired seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Statistical
from runner.proof.verdict import Verdict

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair
    from runner.verify.training_plan import TrainingPlan


class TrainingsCheck(Check):
    """Compares the objective of trainings with and without the stages.

    Args:
        plan: The trainings of this verification.
    """

    name = "trainings"
    question = "Does it learn as much, within the margin of its contract?"
    catches = (
        "rounding, fewer updates or another order of the data from which the model learns "
        "less"
    )

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan

    def applies(self, pair: StagePair) -> bool:
        """Returns True for ``Statistical`` stages that lose more than rounding."""
        return isinstance(pair.contract, Statistical) and not pair.is_inactive

    def cost(self, pair: StagePair) -> str:
        """Returns the number of trainings and their length."""
        unit, length = pair.recipe.length
        options = pair.options
        trainings = f"trainings of {options.steps or length:,} {unit}"
        return f"up to {options.seeds} pairs of {trainings}, fewer if they decide"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Trains, unless the budget has no room for it."""
        return self.plan.judge(pair.stages)
