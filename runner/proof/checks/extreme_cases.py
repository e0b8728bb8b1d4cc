"""Compares updates in extreme cases."""

from __future__ import annotations

from runner.plugin.check import TimeBudget
from runner.proof.adversarial_updates import compare_extreme_cases
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verdict import Verdict


class ExtremeCasesCheck(SubjectCheck):
    """Compares single updates with flags, integers, inputs and parameters at their ends."""

    name = "extreme cases"
    question = (
        "Does an update have the same result, up to rounding, in cases that trainings rarely "
        "reach?"
    )
    catches = "a clamp, a wrong branch for a flag, a number that overflows"

    def applies(self, pair: SubjectPair) -> bool:
        """Returns False if ordinary updates differ already."""
        return pair.is_kept

    def cost(self, pair: SubjectPair) -> str:
        """Returns that it depends on the tensors of a batch."""
        return "a few updates for every tensor of a batch"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Compares the last batch in such cases."""
        return compare_extreme_cases(
            pair.baseline,
            pair.candidate,
            pair.batches[-1],
            pair.promise_name,
            pair.seed,
            pair.is_close,
        )
