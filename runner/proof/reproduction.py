"""The update in which two subjects differ, as a verdict keeps it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from runner.proof.difference import comparable, not_same_bits
from runner.proof.isolation import Isolation
from runner.proof.subject import Build
from runner.proof.subject_states import clones
from runner.proof.trajectory import Trajectory


@dataclass(frozen=True)
class Reproduction:
    """An update in which two subjects differ, and how to make it again.

    Attributes:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        trajectory: The updates.
        update: Number of the update, from 1; 0 for what is made before the first.
        contract: Name of the contract by which the subjects differ.
        last: Number of the last update in which the difference may begin, if it is not known exactly.
    """

    baseline: Build
    changed: Build
    trajectory: Trajectory
    update: int
    contract: str
    last: int | None = None

    def narrowed(self) -> Reproduction:
        """Returns the reproduction of the first update after which states have different bits."""
        if self.last is None:
            return self
        isolations = [self.trajectory.isolated(build) for build in (self.baseline, self.changed)]
        copies = self.trajectory.copies()
        for number, update in enumerate(self.trajectory.updates[: self.last], start=1):
            batches = (self.trajectory.prepare(isolation, update, copies) for isolation in isolations)
            pairs = zip(isolations, batches, strict=True)
            frames = [_frame_after(isolation, clones(batch)) for isolation, batch in pairs]
            if number < self.update:
                continue
            parts = list(isolations[0].subject.state)
            compared = {location: frames[0][location] for location in comparable(frames[0], frames[1], parts)}
            if any(True for _ in not_same_bits(compared, frames[1])):
                return replace(self, update=number, last=None)
        return replace(self, update=self.last, last=None)


def _frame_after(isolation: Isolation, batch: Any) -> Any:
    isolation.advance([batch], lambda _: None)
    return isolation.initial()
