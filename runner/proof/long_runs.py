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

from runner.proof.algebra_check import algebra, perturb
from runner.proof.difference import (
    LOADED_TOLERANCE,
    TIMES,
    Difference,
    by_group,
    compared_values,
    describe_first,
    differing,
    digest,
    shared,
    usual_sizes,
)
from runner.proof.fingerprints import (
    Fingerprints,
    SideEffects,
    fingerprints,
    first_divergence,
    objections,
    side_effects,
)
from runner.proof.isolation import (
    STEP,
    Frame,
    Isolation,
    Location,
    StepError,
    copy_outputs,
)
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_check import ALLOWED_ONCE, group_name
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import clones, leaves, map_tensors, on_host, to_float64
from runner.proof.verdict import Outcome, Verdict, excluded

# Updates between two fingerprints of the state, where only bits count: an error stays in it.
_PIECE = 50
APART = 10
"""Updates in float64, after which rounding errors may be too large to distinguish them from
others.
"""
# Factor of that number at the start, without a state in between, if the baseline is stable enough.
_STRETCH = 5
# Updates in the original precision from each state: code for float32 alone may fail rarely.
_SINGLE = 3
# Number of larger errors that excludes chance.
_OFTEN = 3


class LongRun(NamedTuple):
    """The recorded values of many updates.

    Attributes:
        outputs: Fingerprints of the result of each update.
        states: Fingerprints of the state after every piece.
        parts: Names of the parts of the state.
    """

    outputs: Fingerprints
    states: Fingerprints
    parts: list[str]


def long_run(
    build: Build,
    batches: Sequence[Any],
    updates: int,
    seconds: float = math.inf,
    seed: int = 0,
) -> LongRun:
    """Makes ``updates`` updates with these batches in a cycle, or as many as fit into
    the time. Raises StepError.
    """
    trajectory = Trajectory(batches, seed)
    isolation = trajectory.isolated(build)
    endless_batches = trajectory.endless()
    run = LongRun([], [], list(isolation.subject.state))
    deadline = time.monotonic() + seconds
    while len(run.outputs) < updates:
        if run.outputs and time.monotonic() >= deadline:
            break
        count = min(_PIECE, updates - len(run.outputs))
        piece = islice(endless_batches, count)
        run.outputs.extend(isolation.advance(piece, _output_digests))
        run.states.extend(fingerprints([isolation.initial()]))
    return run


def _output_digests(output: Any) -> dict[Location, bytes]:
    return {
        Location(STEP, "output", path or "output"): digest(value)
        for path, value in leaves(output)
    }


def same_bits(
    expected: LongRun,
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    seed: int = 0,
) -> Verdict:
    """Returns whether the changed one has the bits of the baseline's long run with these
    batches.
    """
    count = len(expected.outputs)
    try:
        actual = long_run(changed, batches, count, seed=seed)
    except StepError as error:
        return error.verdict("Exact", baseline)
    names = shared(expected.parts, actual.parts)
    output = first_divergence(expected.outputs, actual.outputs, names)
    state = first_divergence(expected.states, actual.states, names)
    evidence = {"horizon": count}
    if output is None and state is None:
        return Verdict(Outcome.PASS, "Exact", excluded(count), evidence)
    # Only a failure needs a second run of the baseline.
    if long_run(baseline, batches, count, seed=seed) != expected:
        summary = f"the baseline is not the same twice in {count:,} updates; make it deterministic"
        return Verdict(Outcome.INCONCLUSIVE, "Exact", summary, evidence)
    piece_start = math.inf if state is None else state[0] * _PIECE
    last = None
    # Outputs give the exact update; of the state, only the piece is recorded.
    if output is not None and output[0] <= piece_start + _PIECE:
        number, location = output
        first = number + 1
        position = f"update {first:,}"
    else:
        assert state is not None
        number, location = state
        first = number * _PIECE + 1
        piece_end = (number + 1) * _PIECE
        position = f"updates {first:,} to {piece_end:,}"
        last = min(piece_end, count)
    repeated = Trajectory(list(islice(itertools.cycle(batches), count)), seed)
    reproduction = Reproduction(baseline, changed, repeated, first, "Exact", last)
    position += f", slot 'step': '{location}'"
    summary = f"not the same bits in a long run: {position} differs"
    return Verdict(Outcome.FAIL, "Exact", summary, evidence, reproduction)


def same_algebra(
    baseline: Build,
    changed: Build,
    updates: Iterable[Update],
    seconds: float = math.inf,
    seed: int = 0,
) -> Verdict:
    """Returns whether both stay equal in float64 over many updates, as far as time allows.

    Every few updates should have a state, from which both continue, because rounding alone would
    make them diverge. The changed subject is not built again; only its state is loaded, so that its
    counts continue. From these states it also makes single updates in its original precision, which
    have the bounds of ``close``.
    """
    count = 0
    deadline = time.monotonic() + seconds
    try:
        reference = Isolation(baseline, seed, float64=True)
        candidate = Isolation(changed, seed, float64=True)
        parts = shared(reference.subject.state, candidate.subject.state)
        singles = _SingleUpdates(baseline, changed, seed)
        for piece in _stretched(baseline, _pieces(updates), deadline, seed):
            if piece[0].states is not None:
                singles.add(piece[0], _frames(reference, piece[:1]))
            expected = _frames(reference, piece)
            actual = _frames(candidate, piece)
            difference = _first_difference(expected, actual, parts)
            if difference is not None:
                trajectory = Trajectory(piece, seed, float64=True)
                number = difference.update
                reproduction = Reproduction(
                    baseline, changed, trajectory, number, "Close"
                )
                difference = replace(difference, update=count + number)
                return _judge(reproduction, expected, difference)
            effects = side_effects(SideEffects.of(reference), SideEffects.of(candidate))
            casts = objections(effects, "Close")
            if casts:
                summary = f"in a long run, {casts[0].summary}"
                return replace(casts[0], summary=summary)
            count += len(piece)
            if time.monotonic() > deadline:
                break
        message = singles.exceeding()
        if message:
            summary = f"rounds more than the baseline in a long run: {message}"
            trajectory = Trajectory([singles.furthest], seed)
            reproduction = Reproduction(baseline, changed, trajectory, 1, "Close")
            return Verdict(Outcome.FAIL, "Close", summary, reproduction=reproduction)
    except StepError as error:
        return error.verdict("Close", baseline)
    return Verdict(Outcome.PASS, "Close", excluded(count), {"horizon": count})


class _SingleUpdate(NamedTuple):
    """The recorded values of the updates in the original precision from one state.

    Attributes:
        truth: The result of the baseline in float64.
        baseline: Errors of the baseline, by group.
        candidate: Errors of the changed one, by group, for each repetition.
        frames: The results of these repetitions.
    """

    truth: Frame
    baseline: dict[Location, float]
    candidate: Sequence[dict[Location, float]]
    frames: Sequence[Frame]


class _SingleUpdates:
    """Two subjects in their original precision, and the distances of their updates from the
    baseline's in float64.

    Attributes:
        furthest: The update with the largest error of all that were made.
    """

    def __init__(self, baseline: Build, changed: Build, seed: int) -> None:
        self.furthest: Update | None = None
        self._reference = Isolation(baseline, seed)
        self._candidate = Isolation(changed, seed)
        self._parts = shared(
            self._reference.subject.state, self._candidate.subject.state
        )
        self._updates: list[_SingleUpdate] = []
        self._largest = -1.0

    def add(self, update: Update, truth: Sequence[Frame]) -> None:
        """Makes this update with the baseline, and several times with the changed one."""
        exact = truth[0] | truth[1]
        compared = compared_values(exact, exact, self._parts)
        baseline_errors, _ = self._measure(self._reference, update, compared)
        errors = []
        frames = []
        for _ in range(_SINGLE):
            group_errors, frame = self._measure(self._candidate, update, compared)
            errors.append(group_errors)
            frames.append(frame)
        all_errors = [
            error for group_errors in errors for error in group_errors.values()
        ]
        largest = max(all_errors, default=0.0)
        if largest > self._largest:
            self.furthest = update
            self._largest = largest
        single = _SingleUpdate(on_host(truth[0]), baseline_errors, errors, frames)
        self._updates.append(single)

    @staticmethod
    def _measure(
        isolation: Isolation, update: Update, truth: Frame
    ) -> tuple[dict[Location, float], Frame]:
        """Returns the errors of an update in its results and final state, by group; and
        its results.
        """
        isolation.load(update.states or {}, update.seed)
        (output,) = isolation.advance([clones(update.batch)], copy_outputs)
        state = isolation.initial()
        return by_group(truth, output | state), on_host(output)

    def exceeding(self) -> str | None:
        """Returns a message about updates with too large errors, if they are too many for chance.

        A state in which the baseline overflows is ignored for that group.
        """
        if not self._updates:
            return None
        least = MOST_ULPS * torch.finfo(torch.get_default_dtype()).eps
        usual = usual_sizes([update.truth for update in self._updates])
        for group in self._updates[-1].baseline:
            updates = [
                update
                for update in self._updates
                if math.isfinite(update.baseline.get(group, 0.0))
            ]
            baseline_errors = [update.baseline.get(group, 0.0) for update in updates]
            largest = max(baseline_errors, default=0.0)
            allowed = ALLOWED_ONCE * max(largest, least)
            errors = _errors(updates, group, usual)
            # The condition is negated so that NaN counts as too large.
            exceeding = [error for error in errors if not error <= allowed]
            if len(exceeding) >= _OFTEN:
                count = f"{len(exceeding)} of {len(errors)} single updates"
                return (
                    f"{group_name(group)} in {count} off by up to "
                    f"{max(exceeding):.2g}, the baseline's by {largest:.2g}"
                )
        return None


def _errors(
    updates: Sequence[_SingleUpdate], group: Location, usual: Mapping[Location, float]
) -> list[float]:
    """Returns the errors of the changed one's updates; the largest errors of outputs are relative
    to their usual size.

    An output that passes zero in a state has no size there.
    """
    errors = [
        [group_errors.get(group, 0.0) for group_errors in update.candidate]
        for update in updates
    ]
    if group.kind == "output" and updates:
        furthest = max(range(len(updates)), key=lambda number: max(errors[number]))
        update = updates[furthest]
        by_usual_size = [
            by_group(update.truth, frame, usual).get(group, math.inf)
            for frame in update.frames
        ]
        pairs = zip(errors[furthest], by_usual_size, strict=True)
        errors[furthest] = [min(pair) for pair in pairs]
    return list(itertools.chain.from_iterable(errors))


def _stretched(
    baseline: Build, pieces: Iterator[list[Update]], deadline: float, seed: int
) -> Iterator[list[Update]]:
    """Yields the pieces; the first ones as one, without a state between them, as far as rounding
    alone does not change the baseline's trajectory.
    """
    first = list(islice(pieces, _STRETCH))
    if not first:
        return
    joined = [first[0]]
    joined += [[replace(piece[0], states=None), *piece[1:]] for piece in first[1:]]
    count = _count_stable(baseline, joined, deadline, seed)
    yield list(itertools.chain.from_iterable(joined[:count]))
    yield from first[count:]
    yield from pieces


def _count_stable(
    baseline: Build, pieces: Sequence[Sequence[Update]], deadline: float, seed: int
) -> int:
    """Returns how many pieces, at least one, the baseline computes equally from a state that is
    perturbed by one ulp.
    """
    reference = Isolation(baseline, seed, float64=True)
    perturbed = Isolation(baseline, seed, float64=True)
    parts = list(reference.subject.state)
    for number, piece in enumerate(pieces):
        perturbed_piece = [
            replace(update, states=map_tensors(perturb, to_float64(update.states)))
            for update in piece
        ]
        if number and time.monotonic() > deadline:
            return number
        expected = _frames(reference, piece)
        actual = _frames(perturbed, perturbed_piece)
        if _first_difference(expected, actual, parts, LOADED_TOLERANCE / TIMES):
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


def _frames(isolation: Isolation, piece: Sequence[Update]) -> list[Frame]:
    """Returns the result of each update, and the state at the end."""
    if piece[0].states is not None:
        isolation.load(piece[0].states, piece[0].seed)
    batches = [to_float64(update.batch) for update in piece]
    frames = isolation.advance(batches, copy_outputs)
    return [*frames, isolation.initial()]


def _first_difference(
    expected: Sequence[Frame],
    actual: Sequence[Frame],
    parts: Sequence[str],
    tolerance: float = LOADED_TOLERANCE,
) -> Difference | None:
    """Returns the first difference beyond rounding."""
    last = len(expected) - 1
    for number, (frame, actual_frame) in enumerate(zip(expected, actual, strict=True)):
        compared = compared_values(frame, actual_frame, parts)
        locations = differing(compared, actual_frame, tolerance)
        update = min(number + 1, last)
        difference = describe_first(update, compared, actual_frame, locations)
        if difference is not None:
            return difference
    return None


def _judge(
    reproduction: Reproduction, expected: Sequence[Frame], difference: Difference
) -> Verdict:
    """Returns the verdict on a difference in a piece; new subjects that repeat it also
    determine the slot.
    """
    baseline = reproduction.baseline
    piece = reproduction.trajectory.updates
    seed = reproduction.trajectory.seed
    repeated = algebra(baseline, reproduction.changed, piece, seed)
    if not repeated:
        position = f"from a state on the way to update {difference.update:,}"
        summary = f"in a long run, {position}: {repeated.summary}"
        return replace(repeated, summary=summary)
    frames = _frames(Isolation(baseline, seed, float64=True), piece)
    parts = [location.name for location in expected[-1]]
    if _first_difference(expected, frames, parts):
        summary = (
            "the baseline is not the same in a long run and alone, in float64; make it "
            "deterministic, or return what else it changes from state_dict()"
        )
        return Verdict(Outcome.INCONCLUSIVE, "Close", summary)
    summary = f"not the same algebra in a long run: in float64, {difference}"
    return reproduction.fail(summary, difference)
