"""Compares the updates of a pipeline while its device is late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.device_queues import device_queues
from runner.proof.verdict import Verdict
from runner.proof.work_in_flight import MOST_UPDATES, compare_in_flight
from runner.training.pipeline import resolve_device

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair


class WorkInFlightCheck(Check):
    """Compares updates on sampled batches that the host waits for with updates whose
    device is late.
    """

    name = "work in flight"
    question = (
        "On a GPU: is every update the same, however late the device computes it?"
    )
    catches = (
        "a pinned buffer that is rewritten while its copy is in flight; a copy that does "
        "not wait for the readers of its target, or is not waited for"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns whether the recipe trains on a GPU with an active stage."""
        device = resolve_device(pair.recipe.device)
        return device.type == "cuda" and not pair.is_inactive

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates."""
        return f"5 times {min(pair.options.updates, MOST_UPDATES)} updates"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares the candidate with itself."""
        queues = device_queues()
        if queues is None:
            return pair.passed("nothing is in flight between two updates of a CPU")
        _, candidate = pair.subjects()
        updates = range(pair.options.updates)
        return compare_in_flight(candidate, updates, queues, pair.promise_name, 0)
