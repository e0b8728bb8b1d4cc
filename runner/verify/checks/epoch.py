"""Compares the batches of a complete epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.verdict import Verdict
from runner.verify.epoch import same_epoch, samples

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

MOST_BATCHES = 20_000
"""Batches that are compared at most."""
SHARE_OF_LONG_RUN = 0.4
"""Seconds of this check, as a share of a long run's."""


class EpochCheck(Check):
    """Compares the batches of an epoch without making updates, to its last batch and
    into the next epoch.
    """

    name = "an epoch"
    question = (
        "Does every sample come as often as in the baseline, "
        "and do batches stay as they were returned?"
    )
    catches = (
        "a last batch that is dropped, cut or repeated; "
        "another order in the second epoch; memory used again"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without epochs or a long run, and where a source depends on its
        learner.
        """
        if not pair.has_long_checks or pair.chooses_batches:
            return False
        return pair.baseline.has_fixed_epochs

    def cost(self, pair: StagePair) -> str:
        """Returns the most seconds."""
        seconds = SHARE_OF_LONG_RUN * pair.options.horizon_seconds
        return f"the batches of an epoch, or {seconds:g} s"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares batches and noise by bits."""
        seconds = SHARE_OF_LONG_RUN * budget.at_most(pair.options.horizon_seconds)
        return same_epoch(*pair.builds(samples), pair.contract, MOST_BATCHES, seconds)
