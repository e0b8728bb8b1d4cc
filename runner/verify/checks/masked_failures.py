"""Compares what becomes of failures: NaN, very small numbers, and numbers with few digits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.isolation import StepError
from runner.proof.masked_failures import (
    same_decisions,
    same_digits,
    same_small_numbers,
    unmasked,
)
from runner.proof.trajectory import Update
from runner.proof.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

_RECORDED = 3
"""Updates in which digits and types of numbers are compared."""


class MaskedFailuresCheck(Check):
    """Compares single updates with NaN or very small numbers, and the types to which
    numbers are rounded.
    """

    name = "masked failures"
    question = "Does a failure of numbers show as it does in the baseline?"
    catches = (
        "NaN that is replaced by a number in a loss, a gradient or a parameter; small "
        "numbers that are flushed to zero; gradients with few digits next to larger "
        "ones; a decision at other numbers; 16-bit types inside of an update"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or ``Statistical``."""
        return pair.has_long_checks

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        return "up to 30 updates"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares them by what the contract promises."""
        name = type(pair.contract).__name__
        updates = pair.options.updates
        inputs = pair.batches[updates - 1]._replace(inputs=None)
        start = Update(inputs, pair.baseline.questions[0].states)
        builds = pair.subjects()
        last = pair.batches[updates - _RECORDED : updates]
        recorded = [replace(start, batch=batch) for batch in last]
        comparisons = [
            partial(unmasked, *builds, start, name),
            partial(same_small_numbers, *builds, start, name),
            partial(same_digits, *builds, recorded, name),
        ]
        # A compiler hides what compiled code decides.
        if not pair.is_traced:
            comparisons.append(partial(same_decisions, *builds, start, name))
        try:
            for compare in comparisons:
                verdict = compare()
                if verdict.outcome is not Outcome.PASS:
                    return verdict
        except StepError as error:
            return error.verdict(name, builds[0])
        summary = "failures of numbers show as in the baseline"
        return Verdict(Outcome.PASS, name, summary)
