"""Compares the effect of NaN and infinity in a batch."""

from __future__ import annotations

from runner.plugin.check import TimeBudget
from runner.proof.adversarial_updates import compare_hidden_numbers
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verdict import Verdict


class HiddenNumbersCheck(SubjectCheck):
    """Puts NaN and infinity into one tensor of a batch at a time."""

    name = "numbers that are not finite"
    question = (
        "Does NaN or infinity in a batch reach the state if it reaches the baseline's?"
    )
    catches = (
        "a number in place of NaN, a limit of the loss; INCONCLUSIVE, because a gradient scaler "
        "skips updates on purpose"
    )

    def applies(self, pair: SubjectPair) -> bool:
        """Returns False if updates differ already."""
        return pair.is_kept

    def cost(self, pair: SubjectPair) -> str:
        """Returns the number of updates."""
        return "2 updates for each of the first 8 tensors of a batch"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Compares whether the state stays finite."""
        return compare_hidden_numbers(
            pair.baseline,
            pair.candidate,
            pair.batches[0],
            pair.promise_name,
            pair.seed,
        )
