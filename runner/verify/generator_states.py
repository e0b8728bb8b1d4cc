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
    """Compares the states of random generators, which are ahead where batches are sampled
    in advance.

    A state that differs must be the baseline's in one of the next ``MOST_IN_ADVANCE``
    updates.
    """

    def __init__(self) -> None:
        self._expected: dict[Location, tuple[int, bytes]] = {}

    @property
    def first_ahead(self) -> Location | None:
        """Returns a generator whose state the baseline has not reached yet; None without
        one.
        """
        return next(iter(self._expected), None)

    def add(self, update: int, baseline: Frame, candidate: Frame) -> Location | None:
        """Adds the states after an update; returns one that the baseline has not reached
        in time.
        """
        for location in filter(_is_generator, dict.fromkeys((*baseline, *candidate))):
            state = digest(baseline.get(location, MISSING))
            first_update, expected = self._expected.get(location, (update, state))
            if expected == state:
                self._expected.pop(location, None)
                candidate_state = digest(candidate.get(location, MISSING))
                # A candidate that samples in advance is ahead of the baseline.
                if candidate_state != state:
                    self._expected[location] = update, candidate_state
            elif update - first_update >= MOST_IN_ADVANCE:
                return location
        return None

    def forget(self) -> None:
        """Forgets expected states, because the candidate has the baseline's state."""
        self._expected.clear()


def _is_generator(location: Location) -> bool:
    return location.name.startswith("generators.")
