"""Long runs, for errors that are late or rare: each update is cheap, and the verdict reports the
excluded error rate.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from runner.proof.close_check import ALLOWED_ONCE, algebra, group_name, jog
from runner.proof.difference import (
    LOADED_TOLERANCE,
    MISSING,
    TIMES,
    Difference,
    by_group,
    comparable,
    described,
    differing,
    digest,
    shared,
    usual_sizes,
)
from runner.proof.fingerprints import Prints, SideEffects, fingerprints, objections, parting, side_effects
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build
from runner.proof.subject_states import clones, leaves, on_host, to_float64
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict, excluded
from runner.system.tensor_trees import map_tensors

_PIECE = 50  # updates between two looks at the state, where only bits count: an error stays in it
# Updates in float64, after which rounding errors may be too large to distinguish them from others.
APART = 10
# Factor of that number at the start, without a state in between, if the baseline is stable enough.
_STRETCH = 5
# Updates in the original precision from each state: code for float32 alone may fail rarely.
_SINGLE = 3
_OFTEN = 3  # number of larger errors that excludes chance


class LongRun(NamedTuple):
    """The recorded values of many updates."""

    outputs: Prints  # of the result of each update
    states: Prints  # after every piece
    parts: list[str]  # of the state


def long_run(build: Build, batches: Sequence[Any], updates: int, seconds: float = math.inf, seed: int = 0) -> LongRun:
    """Makes ``updates`` updates with these batches in a cycle, or as many as fit into
    the time. Raises StepError.
    """
    trajectory = Trajectory(batches, seed)
    isolation, given = trajectory.isolated(build), trajectory.endless()
    found, deadline = LongRun([], [], list(isolation.subject.state)), time.monotonic() + seconds
    while len(found.outputs) < updates and (not found.outputs or time.monotonic() < deadline):
        for output in isolation.advance(islice(given, min(_PIECE, updates - len(found.outputs))), _prints):
            found.outputs.append(output)
        found.states.extend(fingerprints([isolation.initial()]))
    return found


def _prints(output: Any) -> dict[Location, bytes]:
    return {Location(STEP, "output", path or "output"): digest(value) for path, value in leaves(output)}


def same_bits(own: LongRun, baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Returns whether the changed one has the bits of the baseline's long run with these
    batches.
    """
    count = len(own.outputs)
    try:
        theirs = long_run(changed, batches, count, seed=seed)
    except StepError as error:
        return error.verdict("Exact", baseline)
    names = shared(own.parts, theirs.parts)
    returned, left = parting(own.outputs, theirs.outputs, names), parting(own.states, theirs.states, names)
    evidence = {"horizon": count}
    if returned is None and left is None:
        return Verdict(Outcome.PASS, "Exact", excluded(count), evidence)
    again = long_run(baseline, batches, count, seed=seed)
    if again != own:
        summary = f"the baseline is not the same twice in {count:,} updates; make it deterministic"
        return Verdict(Outcome.INCONCLUSIVE, "Exact", summary, evidence)
    piece = math.inf if left is None else left[0] * _PIECE
    if returned is not None and returned[0] <= piece + _PIECE:
        when, location = f"update {returned[0] + 1:,}", returned[1]
        first, last = returned[0] + 1, None
    else:
        assert left is not None
        when, location = f"updates {left[0] * _PIECE + 1:,} to {(left[0] + 1) * _PIECE:,}", left[1]
        first, last = left[0] * _PIECE + 1, min((left[0] + 1) * _PIECE, count)
    repeated = list(islice(itertools.cycle(batches), count))
    reproduction = Reproduction(baseline, changed, Trajectory(repeated, seed), first, "Exact", last)
    summary = f"not the same bits in a long run: {when}, slot 'step': '{location}' differs"
    return Verdict(Outcome.FAIL, "Exact", summary, evidence, reproduction)


def same_algebra(
    baseline: Build, changed: Build, updates: Iterable[Update], seconds: float = math.inf, seed: int = 0
) -> Verdict:
    """Returns whether both stay equal in float64 over many updates, as far as time allows.

    Every few updates should have a state, from which both continue, because rounding alone would
    make them diverge. The changed subject is not built again; only its state is loaded, so that its
    counts continue. From these states it also makes single updates in its original precision, which
    have the bounds of ``close``.
    """
    count, deadline = 0, time.monotonic() + seconds
    try:
        one, other = (Isolation(build, seed, float64=True) for build in (baseline, changed))
        parts, singles = shared(one.subject.state, other.subject.state), _Singles(baseline, changed, seed)
        for piece in _stretched(baseline, _pieces(updates), deadline, seed):
            if piece[0].states is not None:
                singles.take(piece[0], _moved(one, piece[:1]))
            own, theirs = (_moved(isolation, piece) for isolation in (one, other))
            if found := _apart(own, theirs, count, parts):
                return _judged(baseline, changed, piece, own, found, seed, found.update - count)
            if cast := objections(side_effects(SideEffects.of(one), SideEffects.of(other)), "Close"):
                return replace(cast[0], summary=f"in a long run, {cast[0].summary}")
            count += len(piece)
            if time.monotonic() > deadline:
                break
        if beyond := singles.beyond():
            summary = f"rounds more than the baseline in a long run: {beyond}"
            reproduction = Reproduction(baseline, changed, Trajectory([singles.furthest], seed), 1, "Close")
            return Verdict(Outcome.FAIL, "Close", summary, reproduction=reproduction)
    except StepError as error:
        return error.verdict("Close", baseline)
    return Verdict(Outcome.PASS, "Close", excluded(count), {"horizon": count})


class _Single(NamedTuple):
    """The recorded values of the updates in the original precision from one state."""

    returned: Frame  # by the baseline in float64
    own: dict[Location, float]  # how far off the baseline is, by group
    theirs: Sequence[dict[Location, float]]  # and the changed one, each time
    frames: Sequence[Frame]  # the results of these updates


class _Singles:
    """Two subjects in their original precision, and the distances of their updates from the
    baseline's in float64.
    """

    def __init__(self, baseline: Build, changed: Build, seed: int) -> None:
        self._one, self._other = (Isolation(build, seed) for build in (baseline, changed))
        self._parts = shared(self._one.subject.state, self._other.subject.state)
        self._found = list[_Single]()
        self.furthest: Update | None = None
        """The update that is furthest off, of all that were made."""
        self._largest = -1.0

    def take(self, update: Update, truth: Sequence[Frame]) -> None:
        """The baseline makes this update, the changed one makes it several times."""
        exact = truth[0] | truth[1]
        seen = {location: exact[location] for location in comparable(exact, exact, self._parts)}
        own, _ = self._made(self._one, update, seen)
        errors, frames = zip(*(self._made(self._other, update, seen) for _ in range(_SINGLE)), strict=True)
        largest = max((error for frame in errors for error in frame.values()), default=0.0)
        if largest > self._largest:
            self.furthest, self._largest = update, largest
        self._found.append(_Single(on_host(truth[0]), own, errors, frames))

    @staticmethod
    def _made(isolation: Isolation, update: Update, truth: Frame) -> tuple[dict[Location, float], Frame]:
        """Returns the errors of an update in its results and final state, by group; and
        its results.
        """
        isolation.load(update.states or {}, update.seed)
        output, state = isolation.advance([clones(update.batch)], _values)[0], isolation.initial()
        return by_group(truth, output | state), on_host(output)

    def beyond(self) -> str | None:
        """Returns a message about updates with too large errors, if they are too many for chance.

        A state in which the baseline overflows is ignored for that group.
        """
        least = MOST_ULPS * torch.finfo(torch.get_default_dtype()).eps
        usual = usual_sizes([each.returned for each in self._found])
        for group in self._found[-1].own if self._found else ():
            states = [each for each in self._found if math.isfinite(each.own.get(group, 0.0))]
            own = max((each.own.get(group, 0.0) for each in states), default=0.0)
            allowed, theirs = ALLOWED_ONCE * max(own, least), _errors(states, group, usual)
            beyond = [each for each in theirs if not each <= allowed]
            if len(beyond) >= _OFTEN:
                return (
                    f"{group_name(group)} in {len(beyond)} of {len(theirs)} single updates off by up to "
                    f"{max(beyond):.2g}, the baseline's by {own:.2g}"
                )
        return None


def _errors(states: Sequence[_Single], group: Location, usual: Mapping[Location, float]) -> list[float]:
    """Returns the errors of the changed one's updates; the largest errors of outputs are relative
    to their usual size.

    One that passes zero in a state has no size there.
    """
    theirs = [[each.get(group, 0.0) for each in state.theirs] for state in states]
    if group.kind == "output" and states:
        furthest = max(range(len(states)), key=lambda number: max(theirs[number]))
        at = states[furthest]
        by_usual = (by_group(at.returned, frame, usual).get(group, math.inf) for frame in at.frames)
        theirs[furthest] = [min(pair) for pair in zip(theirs[furthest], by_usual, strict=True)]
    return [error for each in theirs for error in each]


def _stretched(baseline: Build, pieces: Iterator[list[Update]], deadline: float, seed: int) -> Iterator[list[Update]]:
    """The first pieces as one, without a state between them, as far as rounding alone does not part the baseline."""
    first = list(islice(pieces, _STRETCH))
    if not first:
        return
    whole = [first[0], *([replace(piece[0], states=None), *piece[1:]] for piece in first[1:])]
    count = _steady(baseline, whole, deadline, seed)
    yield [update for piece in whole[:count] for update in piece]
    yield from first[count:]
    yield from pieces


def _steady(baseline: Build, pieces: Sequence[Sequence[Update]], deadline: float, seed: int) -> int:
    """Returns how many pieces, at least one, the baseline computes equally from a state that is
    perturbed by one ulp.
    """
    one, jogged = (Isolation(baseline, seed, float64=True) for _ in range(2))
    for number, piece in enumerate(pieces):
        off = [replace(each, states=map_tensors(jog, to_float64(each.states))) for each in piece]
        late = number and time.monotonic() > deadline
        if late or _apart(
            _moved(one, piece), _moved(jogged, off), 0, list(one.subject.state), LOADED_TOLERANCE / TIMES
        ):
            return max(number, 1)
    return len(pieces)


def _pieces(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Yields the updates from one given state to the next."""
    piece: list[Update] = []
    for update in updates:
        if piece and update.states is not None:
            yield piece
            piece = []
        piece.append(update)
    if piece:
        yield piece


def _moved(isolation: Isolation, piece: Sequence[Update]) -> list[Frame]:
    """Returns the result of each update, and the state at the end."""
    if piece[0].states is not None:
        isolation.load(piece[0].states, piece[0].seed)
    frames = isolation.advance([to_float64(update.batch) for update in piece], _values)
    return [*frames, isolation.initial()]


def _values(output: Any) -> Frame:
    return {Location(STEP, "output", path or "output"): clones(value) for path, value in leaves(output)}


def _apart(
    own: Sequence[Frame], theirs: Sequence[Frame], before: int, parts: Sequence[str],
    tolerance: float = LOADED_TOLERANCE,
) -> Difference | None:  # fmt: skip
    """Returns the first difference beyond rounding, in updates after ``before`` others."""
    for number, (mine, others) in enumerate(zip(own, theirs, strict=True)):
        seen = {location: mine[location] for location in comparable(mine, others, parts)}
        place = next(differing(seen, others, tolerance), None)
        if place is not None:
            update = before + min(number + 1, len(own) - 1)
            return described(update, place, mine[place], others.get(place, MISSING))
    return None


def _judged(
    baseline: Build, changed: Build, piece: Sequence[Update], own: Sequence[Frame], found: Difference, seed: int,
    number: int,
) -> Verdict:  # fmt: skip
    """Returns the verdict on a difference in a piece; new subjects that repeat it also
    determine the slot.
    """
    anew = algebra(baseline, changed, piece, seed)
    if not anew:
        when = f"in a long run, from a state on the way to update {found.update:,}: "
        return replace(anew, summary=f"{when}{anew.summary}")
    again = _moved(Isolation(baseline, seed, float64=True), piece)
    if _apart(own, again, 0, [location.name for location in own[-1]]):
        summary = "the baseline is not the same in a long run and alone, in float64; make it deterministic"
        return Verdict(Outcome.INCONCLUSIVE, "Close", summary)
    summary = f"not the same algebra in a long run: in float64, {found}"
    reproduction = Reproduction(baseline, changed, Trajectory(piece, seed, float64=True), number, "Close")
    return Verdict(Outcome.FAIL, "Close", summary, {"difference": found.data()}, reproduction)
