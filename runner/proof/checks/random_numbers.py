"""Compares the random numbers of compiled code as a training draws them."""

from __future__ import annotations

from runner.plugin.check import TimeBudget
from runner.proof.randomness import SECONDS, same_randomness
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verdict import Verdict


class RandomNumbersCheck(SubjectCheck):
    """Compares slopes and statistics of updates whose compiled code draws as in a training."""

    name = "random numbers"
    question = (
        "Do the random numbers of compiled code have the same effect as the baseline's?"
    )
    catches = "a wrong keep rate, a repeated mask, a backward pass with another mask"

    def applies(self, pair: SubjectPair) -> bool:
        """Returns False if updates differ already."""
        return pair.is_kept

    def cost(self, pair: SubjectPair) -> str:
        """Returns the number of updates, and the most seconds."""
        limit = f"up to 512 of each, or {SECONDS:g} s"
        return f"3 updates; {limit}, if compiled code draws other numbers"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Compares statistics where values differ."""
        return same_randomness(
            pair.baseline,
            pair.candidate,
            pair.batches,
            pair.promise_name,
            pair.seed,
            seconds=budget.at_most(SECONDS),
            compiled_before=pair.compiled_before,
        )
