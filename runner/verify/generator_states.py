"""Compares the states of random generators where batches may be sampled in advance."""

from __future__ import annotations

from runner.proof.difference import MISSING, digest
from runner.proof.isolation import Frame, Location

MOST_IN_ADVANCE = 8
"""Batches that may be sampled before their update."""


def without_generators(frame: Frame) -> Frame:
    """Returns a frame without the states of random generators."""
    return {
        location: value
        for location, value in frame.items()
        if not _is_generator(location)
    }


class GeneratorStates:
    """Compares the states of random generators, which are ahead where batches are sampled in advance.

    A state that differs must be the baseline's in one of the next ``MOST_IN_ADVANCE`` updates.
    """

    def __init__(self) -> None:
        self._expected: dict[Location, tuple[int, bytes]] = {}

    @property
    def first_ahead(self) -> Location | None:
        """Returns a generator of whose candidate's state the baseline has not reached yet; None without one."""
        return next(iter(self._expected), None)

    def add(self, update: int, baseline: Frame, candidate: Frame) -> Location | None:
        """Adds the states after an update; returns one that the baseline has not reached in time."""
        for location in filter(_is_generator, dict.fromkeys((*baseline, *candidate))):
            digest_of_baseline = digest(baseline.get(location, MISSING))
            since, expected = self._expected.get(location, (update, digest_of_baseline))
            if expected == digest_of_baseline:
                self._expected.pop(location, None)
                digest_of_candidate = digest(candidate.get(location, MISSING))
                if digest_of_candidate != digest_of_baseline:
                    self._expected[location] = update, digest_of_candidate
            elif update - since >= MOST_IN_ADVANCE:
                return location
        return None

    def forget(self) -> None:
        """Forgets what is expected, because the candidate was given the baseline's state."""
        self._expected.clear()


def _is_generator(location: Location) -> bool:
    return location.name.startswith("generators.")
