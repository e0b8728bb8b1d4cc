"""The update in which two subjects differ, for a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.proof.difference import Difference, compared_values, not_same_bits
from runner.proof.subject import Build
from runner.proof.trees import clones
from runner.proof.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from runner.proof.isolation import Frame, Isolation
    from runner.proof.trajectory import Trajectory


@dataclass(frozen=True)
class Reproduction:
    """An update in which two subjects differ, and how to make it again.

    Attributes:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        trajectory: The updates.
        update: Number of the update, from 1; 0 for the building of the subjects.
        contract: Name of the contract by which the subjects differ.
        last: Number of the last update in which the difference may occur first; None if
            ``update`` is exact.
    """

    baseline: Build
    changed: Build
    trajectory: Trajectory
    update: int
    contract: str
    last: int | None = None

    def fail(
        self, summary: str, difference: Difference, evidence: Mapping[str, Any] = {}
    ) -> Verdict:
        """Returns a FAIL with this reproduction, and with the difference as evidence."""
        all_evidence = {**evidence, "difference": difference.data()}
        return Verdict(Outcome.FAIL, self.contract, summary, all_evidence, self)

    def narrowed(self) -> Reproduction:
        """Returns the reproduction of the first update after which states have different bits."""
        if self.last is None:
            return self
        reference = self.trajectory.isolated(self.baseline)
        candidate = self.trajectory.isolated(self.changed)
        copies = self.trajectory.copies()
        updates = self.trajectory.updates[: self.last]
        for number, update in enumerate(updates, start=1):
            # Both get the same batch, and a step may write into it: each step gets a clone.
            batch = self.trajectory.prepare(reference, update, copies)
            expected = _frame_after(reference, clones(batch))
            batch = self.trajectory.prepare(candidate, update, copies)
            actual = _frame_after(candidate, clones(batch))
            if number < self.update:
                continue
            compared = compared_values(expected, actual, reference.subject.state)
            if next(not_same_bits(compared, actual), None) is not None:
                return replace(self, update=number, last=None)
        # Outputs may differ although no state does.
        return replace(self, update=self.last, last=None)


def _frame_after(isolation: Isolation, batch: Any) -> Frame:
    isolation.advance([batch], lambda _: None)
    return isolation.initial()
