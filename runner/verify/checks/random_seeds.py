"""Looks for global random generators that a candidate seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.isolation import StepError
from runner.proof.verdict import Verdict
from runner.verify.seeding import MOMENTS, UPDATE, find_seeds, seed_uses
from runner.verify.subjects import built

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class RandomSeedsCheck(Check):
    """Trains the candidate with two seeds of the global generators, and compares their
    states.
    """

    name = "random seeds"
    question = "Does the change leave the seeds of global random generators alone?"
    catches = (
        "a seed that is set when a pipeline is built, in an update, a prediction or an "
        "evaluation"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or choose
        the batch size.
        """
        return pair.has_long_run and not pair.chooses_batches

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        return f"twice {MOMENTS.count(UPDATE)} updates, a prediction and an evaluation"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Reports the first generator that the candidate seeds, and the baseline does not.

        Raises:
            StepError: The baseline's evaluation raises it.
        """
        baseline = built(seed_uses(pair.recipe, pair.registry, ()))
        try:
            seeds = find_seeds(pair.candidate(seed_uses))
        except StepError as error:
            # An error that the baseline raises, too, is not an effect of the change.
            find_seeds(baseline)
            return error.verdict(pair.promise_name, None)
        if not seeds:
            return pair.passed("no global random generator is seeded")
        # Seeds of the baseline are not an effect of the change, either.
        expected = find_seeds(baseline)
        for name, moment in seeds:
            if (name, moment) not in expected:
                return pair.failed(
                    f"{moment} seeds the global random generator of {name}: "
                    "later draws repeat earlier ones"
                )
        return pair.passed("the baseline seeds the same global random generators")
