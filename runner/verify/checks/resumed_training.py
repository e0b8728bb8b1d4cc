"""Compares a training that was interrupted and resumed with one that was not."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.subject import Build
from runner.proof.verdict import Verdict
from runner.verify.sampling_checks import RESUMED_UPDATES, draws, same_when_resumed
from runner.verify.subjects import built

if TYPE_CHECKING:
    from runner.plugin.source import State
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class ResumedTrainingCheck(Check):
    """Interrupts a training, stores it, resumes it, and compares it with itself."""

    name = "a resumed training"
    question = "Is a training that was interrupted and resumed the one that was not?"
    catches = (
        "state that no checkpoint contains or can hold; a stage that starts from the "
        "beginning"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive or choose the batch size."""
        return not pair.is_inactive and not pair.chooses_batches

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        updates = f"{pair.options.updates} updates"
        return f"{updates}, a checkpoint, and twice {RESUMED_UPDATES} updates"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares the candidate with itself; a baseline that does not resume excuses it."""
        registry = pair.registry

        def baseline(checkpoint: State | None) -> Build:
            return built(draws(pair.recipe, registry, (), resumed=checkpoint))

        def candidate(checkpoint: State | None) -> Build:
            return pair.candidate(partial(draws, resumed=checkpoint))

        updates = pair.options.updates
        return same_when_resumed(baseline, candidate, pair.contract, updates)
