"""Compares the batches that updates are given, and the random numbers that sampling uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close
from runner.proof.verdict import Verdict
from runner.verify.sampling_checks import ComparisonLength, draws, same_draws

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

SHARE_OF_LONG_RUN = 0.2
"""Seconds of this check, as a share of a long run's."""


class SampledBatchesCheck(Check):
    """Compares batches, noise, counts and the state of generators, update by update."""

    name = "sampled batches"
    question = (
        "Does each update learn from the same batch, with the same random numbers?"
    )
    catches = (
        "samples that are left out, repeated, cut or shuffled otherwise; more or fewer "
        "random numbers"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive or choose the batch size."""
        return not pair.is_inactive and not pair.chooses_batches

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        options = pair.options
        if isinstance(pair.contract, Close) and options.horizon > options.updates:
            seconds = SHARE_OF_LONG_RUN * options.horizon_seconds
            return f"{options.updates} updates, and more for {seconds:g} s"
        return f"{options.updates} updates"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares what is sampled; of a ``Statistical`` candidate only the form."""
        options = pair.options
        length = ComparisonLength(options.updates)
        # The long run of an exact candidate samples by itself.
        if isinstance(pair.contract, Close):
            seconds = SHARE_OF_LONG_RUN * budget.at_most(options.horizon_seconds)
            length = ComparisonLength(options.updates, options.horizon, seconds)
        return same_draws(*pair.builds(draws), pair.contract, length)
