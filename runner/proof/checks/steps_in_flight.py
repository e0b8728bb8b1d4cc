"""Compares steps while the device is late."""

from __future__ import annotations

from runner.plugin.check import TimeBudget
from runner.proof.device_queues import device_queues
from runner.proof.subject_pair import SubjectCheck, SubjectPair
from runner.proof.verdict import Outcome, Verdict
from runner.proof.work_in_flight import MOST_UPDATES, compare_in_flight


class StepsInFlightCheck(SubjectCheck):
    """Compares steps that the host waits for with steps whose device, or whose side streams,
    are late.
    """

    name = "steps in flight"
    question = "On a GPU: is every step the same, however late the device computes it?"
    catches = (
        "a pinned buffer that is rewritten while its copy is in flight; a copy that does not "
        "wait for the readers of its target, or is not waited for"
    )
    judges_contract = False

    def applies(self, pair: SubjectPair) -> bool:
        """Returns whether a device computes later than the host submits the work."""
        return pair.is_kept and device_queues() is not None

    def cost(self, pair: SubjectPair) -> str:
        """Returns the number of updates."""
        return f"5 times {min(len(pair.batches), MOST_UPDATES)} updates"

    def run(self, pair: SubjectPair, budget: TimeBudget) -> Verdict:
        """Compares the candidate with itself."""
        queues = device_queues()
        if queues is None:
            summary = "nothing is in flight between two steps of a CPU"
            return Verdict(Outcome.PASS, pair.promise_name, summary)
        return compare_in_flight(
            pair.candidate, pair.batches, queues, pair.promise_name, pair.seed
        )
