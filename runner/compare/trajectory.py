"""What two subjects do over the same updates, and the first place where they part."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.compare.isolation import STEP, Frame, Isolation, Location, StepError
from runner.compare.state import clones
from runner.compare.subject import Build
from runner.compare.values import MISSING, difference, same_bits
from runner.compare.verdict import Difference


@dataclass(frozen=True)
class Update:
    """One update."""

    batch: Any
    """Updates with the same object get the same one again."""
    states: Mapping[str, Any] | None = None
    """Loaded before the update."""


@dataclass(frozen=True)
class Trajectory:
    """Some updates, from the same seed for whoever makes them."""

    updates: Sequence[Update]
    seed: int
    dtype: torch.dtype | None = None
    """The default floating-point type; the present one unless told."""

    def isolated(self, build: Build, watching: bool = False) -> Isolation:
        """A subject that has not moved yet."""
        if torch.cuda.is_available():
            gc.collect()  # the one before may hold the device's memory in a circle of references
        return Isolation(build, self.seed, self.dtype, watching)

    def frames(self, isolation: Isolation, watched: int | None = None) -> Iterator[Frame]:
        """What can be seen before the first update, and after each.

        Args:
            isolation: not moved yet.
            watched: the update whose slots show what they returned.

        Raises:
            StepError: the subject failed.
        """
        yield isolation.initial()
        own = {id(update.batch): clones(update.batch) for update in self.updates}
        for number, update in enumerate(self.updates, start=1):
            if update.states is not None:
                isolation.load(update.states)
            yield isolation.step(own[id(update.batch)], watching=number == watched)


Criterion = Callable[[Frame, Frame], Iterable[Location]]
"""The locations of the first frame, in its order, at which the second is not as it should be."""


def not_same_bits(baseline: Frame, changed: Frame) -> Iterator[Location]:
    """The criterion of those who promise the same bits."""
    return (location for location, value in baseline.items() if not same_bits(value, changed.get(location, MISSING)))


def comparable(
    baseline: Iterable[Location], changed: Mapping[Location, Any], states: Iterable[str]
) -> Iterator[Location]:
    """The locations by which a subject is judged, in order.

    A gradient counts where both have one: that of a step which has forgotten it says nothing.

    Args:
        baseline: what can be seen of one.
        changed: what can be seen of the other.
        states: the names of the parts of the state that both have.
    """
    prefixes = tuple(f"{name}." for name in states)
    for location in baseline:
        kept = location in changed if location.kind == "gradient" else f"{location.name}.".startswith(prefixes)
        if kept or location.kind == "output":
            yield location


def shared(baseline: Iterable[str], changed: Iterable[str]) -> list[str]:
    """The names of the parts of the state that both subjects have.

    Raises:
        ValueError: there is none, so that nothing could be compared.
    """
    own, theirs = list(baseline), list(changed)
    names = [name for name in own if name in theirs]
    if not names:
        raise ValueError(
            f"nothing to compare: the baseline's state has the parts {own}, the changed one's {theirs}; give what is "
            "the same the same name"
        )
    return names


def newly_untrained(baseline: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a gradient reaches in the baseline alone, with what they receive in the changed one."""
    return {name: reason for name, reason in changed.items() if name not in baseline}


def locate(
    trajectory: Trajectory, baseline: Build, changed: Build, update: int, criterion: Criterion
) -> Difference | None:
    """Makes them once more, with slots that show what they returned, to find where an update parts.

    Args:
        trajectory: in which a difference was found.
        baseline: makes the one.
        changed: makes the other.
        update: after which it was found.
        criterion: that found it.

    Returns:
        None if there is no difference this time.

    Raises:
        StepError: one of them failed.
    """
    isolations = [trajectory.isolated(build, watching=True) for build in (baseline, changed)]
    names = shared(*(isolation.subject.state for isolation in isolations))
    one, other = (_frame(trajectory, isolation, update) for isolation in isolations)
    seen = {location: one.get(location, MISSING) for location in in_order(one, other, names)}
    location = next(iter(criterion(seen, other)), None)
    return None if location is None else difference(update, location, seen[location], other.get(location, MISSING))


def in_order(one: Frame, other: Frame, states: Sequence[str]) -> list[Location]:
    """All that may tell where an update parts, in the order in which it happened in the baseline.

    After a slot that both have called as often, a gradient that only one of them has tells something, too.
    """
    returned = {(location.slot, location.visit): number for number, location in enumerate(one)}
    called = {(location.slot, location.visit) for location in other} - {(STEP, 0)}
    inner = [location for location in one if (location.slot, location.visit) in called]
    inner += [location for location in other if location.kind == "gradient" and location not in one]
    kinds = ("output", "gradient", "state")
    inner = [location for location in inner if (location.slot, location.visit) in returned and location.slot != STEP]
    inner.sort(key=lambda location: (returned[location.slot, location.visit], kinds.index(location.kind)))
    return [*comparable(inner, dict.fromkeys(inner), states), *comparable(_of_step(one), other, states)]


def _of_step(frame: Frame) -> list[Location]:
    return [location for location in frame if location.slot == STEP]


def _frame(trajectory: Trajectory, isolation: Isolation, update: int) -> Frame:
    for number, frame in enumerate(trajectory.frames(isolation, watched=update)):
        if number == update:
            return frame
    raise AssertionError("no such update")


def failure(error: StepError) -> str:
    """A failed step in a verdict's summary."""
    return f"update {error.update}: the changed step raises {error}"
