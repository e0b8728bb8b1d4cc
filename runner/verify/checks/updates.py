"""Compares updates on recorded batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.proof.checks.gradients import health
from runner.proof.fingerprints import WHOLE_PROCESS
from runner.proof.verdict import Outcome, Verdict
from runner.proof.verify_subjects import compare
from runner.verify.options import LATE
from runner.verify.variants import beyond_updates

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class UpdatesCheck(Check):
    """Compares updates on recorded batches, by the contract."""

    name = "updates"
    question = "Does every update come to the same on the same batch?"
    catches = (
        "another loss, gradient, optimizer step or logged value; caches that return stale values; "
        "parameters without gradients; NaN that is hidden; random numbers of compiled code"
    )

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates of both."""
        updates = pair.options.updates + len(LATE)
        if isinstance(pair.promised, Exact):
            return f"{updates} updates, the baseline's twice"
        return f"{updates} updates in float64 and in float32"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares bits for ``Exact``, algebra for ``Close``, and for ``Statistical``
        properties that need no training.
        """
        if isinstance(pair.promised, Exact):
            return self._compare_bits(pair)
        fetching = beyond_updates(pair.recipe, pair.stages)
        if isinstance(pair.promised, Close):
            return self._compare_algebra(pair, fetching)
        if fetching is None:
            closeness = pair.closeness
            if closeness:
                summary = (
                    "nothing is lost but rounding, which needs no training to see: "
                    f"{closeness.summary}"
                )
                return replace(closeness, summary=summary)
            # Trainings with a changed baseline would be wrong.
            if WHOLE_PROCESS in closeness.evidence.get("contract", {}):
                return closeness
        baseline, candidate = pair.subjects()
        return health(candidate, pair.batches, baseline)

    def _compare_bits(self, pair: StagePair) -> Verdict:
        verdict = compare(*pair.subjects(), pair.batches, Exact())
        # The long run samples batches, too.
        if not verdict or pair.options.horizon:
            return verdict
        sampled = pair.sampled_updates()
        return verdict if sampled else sampled

    def _compare_algebra(self, pair: StagePair, fetching: str | None) -> Verdict:
        if fetching is not None and pair.recipe.stages[fetching].prepares:
            summary = (
                f"{fetching} changes which batches are sampled, "
                "which no recorded batch shows: promise Statistical"
            )
            return Verdict(Outcome.INCONCLUSIVE, "Close", summary)
        return pair.closeness
