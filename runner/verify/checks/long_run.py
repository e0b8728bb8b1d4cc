"""Compares many updates, to bound how rare an error can be that stays undetected."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Exact
from runner.proof.long_runs import APART, same_algebra, same_bits
from runner.proof.verdict import Outcome, Verdict
from runner.verify.subjects import training_updates

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class LongRunCheck(Check):
    """Compares many updates on batches that candidate and baseline sample themselves."""

    name = "a long run"
    question = "Does it stay the same for many updates?"
    catches = (
        "an error in one of some hundred updates; caches that are renewed too rarely"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a horizon, and for stages that are inactive or ``Statistical``."""
        return pair.has_long_checks

    def cost(self, pair: StagePair) -> str:
        """Returns the most updates and seconds."""
        options = pair.options
        if options.completes_horizon:
            return f"{options.horizon:,} updates of each"
        return f"up to {options.horizon:,} updates, or {options.horizon_seconds:g} s, of each"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares bits, or algebra from states on the baseline's trajectory."""
        options = pair.options
        seconds = budget.at_most(options.long_run_seconds)
        baseline, candidate = pair.subjects()
        if isinstance(pair.contract, Exact):
            verdict = same_bits(
                pair.baseline.long_run(seconds), baseline, candidate, range(1)
            )
            if verdict.outcome is not Outcome.FAIL:
                return verdict
            # A few updates may show the place of the same error.
            sampled = pair.sampled_updates()
            return verdict if sampled else sampled
        updates = training_updates(pair.recipe, pair.registry, options.horizon, APART)
        with closing(updates):
            return same_algebra(baseline, candidate, updates, seconds)
