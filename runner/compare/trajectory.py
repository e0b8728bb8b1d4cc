"""What two subjects do over the same updates, and the first place where they part."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.compare.isolation import STEP, Frame, Place, StepError, World
from runner.compare.state import clones
from runner.compare.subject import Build
from runner.compare.values import MISSING, difference, same_bits
from runner.compare.verdict import Difference


@dataclass(frozen=True)
class Turn:
    """One update."""

    batch: Any
    """Turns with the same object get the same one again."""
    states: Mapping[str, Any] | None = None
    """Loaded before the update."""


@dataclass(frozen=True)
class Play:
    """Some updates, from the same seed for whoever plays them."""

    turns: Sequence[Turn]
    seed: int
    dtype: torch.dtype | None = None
    """The default floating-point type; the present one unless told."""

    def world(self, build: Build, watching: bool = False) -> World:
        """A subject that has not moved yet."""
        if torch.cuda.is_available():
            gc.collect()  # the one before may hold the device's memory in a circle of references
        return World(build, self.seed, self.dtype, watching)

    def frames(self, world: World, watched: int | None = None) -> Iterator[Frame]:
        """What can be seen before the first update, and after each.

        Args:
            world: not moved yet.
            watched: the update whose slots show what they returned.

        Raises:
            StepError: the subject failed.
        """
        yield world.initial()
        own = {id(turn.batch): clones(turn.batch) for turn in self.turns}
        for number, turn in enumerate(self.turns, start=1):
            if turn.states is not None:
                world.load(turn.states)
            yield world.step(own[id(turn.batch)], watching=number == watched)


Judge = Callable[[Frame, Frame], Iterable[Place]]
"""The places of the first frame, in its order, at which the second is not as it should be."""


def not_same_bits(baseline: Frame, changed: Frame) -> Iterator[Place]:
    """The judge of those who promise the same bits."""
    return (place for place, value in baseline.items() if not same_bits(value, changed.get(place, MISSING)))


def comparable(baseline: Iterable[Place], changed: Mapping[Place, Any], states: Iterable[str]) -> Iterator[Place]:
    """The places by which a subject is judged, in order.

    A gradient counts where both have one: that of a step which has forgotten it says nothing.

    Args:
        baseline: what can be seen of one.
        changed: what can be seen of the other.
        states: the names of the parts of the state that both have.
    """
    prefixes = tuple(f"{name}." for name in states)
    for place in baseline:
        kept = place in changed if place.kind == "gradient" else f"{place.name}.".startswith(prefixes)
        if kept or place.kind == "output":
            yield place


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


def blamed(baseline: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a gradient reaches in the baseline alone, with what they receive in the changed one."""
    return {name: reason for name, reason in changed.items() if name not in baseline}


def locate(play: Play, baseline: Build, changed: Build, update: int, judge: Judge) -> Difference | None:
    """Plays once more, with slots that show what they returned, to find where an update parts.

    Args:
        play: in which a difference was found.
        baseline: makes the one.
        changed: makes the other.
        update: after which it was found.
        judge: that found it.

    Returns:
        None if there is no difference this time.

    Raises:
        StepError: one of them failed.
    """
    worlds = [play.world(build, watching=True) for build in (baseline, changed)]
    names = shared(*(world.subject.state for world in worlds))
    one, other = (_frame(play, world, update) for world in worlds)
    seen = {place: one.get(place, MISSING) for place in in_order(one, other, names)}
    place = next(iter(judge(seen, other)), None)
    return None if place is None else difference(update, place, seen[place], other.get(place, MISSING))


def in_order(one: Frame, other: Frame, states: Sequence[str]) -> list[Place]:
    """All that may tell where an update parts, in the order in which it happened in the baseline.

    After a slot that both have called as often, a gradient that only one of them has tells something, too.
    """
    returned = {(place.slot, place.visit): number for number, place in enumerate(one)}
    called = {(place.slot, place.visit) for place in other} - {(STEP, 0)}
    inner = [place for place in one if (place.slot, place.visit) in called]
    inner += [place for place in other if place.kind == "gradient" and place not in one]
    kinds = ("output", "gradient", "state")
    inner = [place for place in inner if (place.slot, place.visit) in returned and place.slot != STEP]
    inner.sort(key=lambda place: (returned[place.slot, place.visit], kinds.index(place.kind)))
    return [*comparable(inner, dict.fromkeys(inner), states), *comparable(_of_step(one), other, states)]


def _of_step(frame: Frame) -> list[Place]:
    return [place for place in frame if place.slot == STEP]


def _frame(play: Play, world: World, update: int) -> Frame:
    for number, frame in enumerate(play.frames(world, watched=update)):
        if number == update:
            return frame
    raise AssertionError("no such update")


def failure(error: StepError) -> str:
    """A failed step in a verdict's summary."""
    return f"update {error.update}: the changed step raises {error}"
