"""Long runs, for errors that are late or rare: they cost little, and what they exclude is said."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from runner.compare.close import algebra
from runner.compare.difference import digest, shared
from runner.compare.fingerprints import Prints, fingerprints, parting
from runner.compare.isolation import STEP, Location, StepError, Trajectory, Update
from runner.compare.states import leaves, saved
from runner.compare.subject import Build
from runner.compare.verdict import Outcome, Verdict, excluded

_PIECE = 50  # updates between two looks at the state, where only bits count: an error stays in it
_APART = 10  # updates in float64, after which rounding alone has grown too large to be told from an error


class LongRun(NamedTuple):
    """What is kept of many updates."""

    outputs: Prints  # of what each has returned
    states: Prints  # after every piece
    parts: list[str]  # of the state


def long_run(build: Build, batches: Sequence[Any], updates: int, seconds: float = math.inf, seed: int = 0) -> LongRun:
    """Makes so many updates with these batches, again and again; or as many as fit into the time. Raises StepError."""
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
    """Whether the changed one comes to the same bits as the baseline's long run, whose batches these were."""
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
    else:
        assert left is not None
        when, location = f"updates {left[0] * _PIECE + 1:,} to {(left[0] + 1) * _PIECE:,}", left[1]
    summary = f"not the same bits in a long run: {when}, slot 'step': '{location}' differs"
    return Verdict(Outcome.FAIL, "Exact", summary, evidence)


def same_algebra(
    baseline: Build, changed: Build, batches: Sequence[Any], updates: int, seconds: float, seed: int = 0
) -> Verdict:
    """Whether both stay equal in float64 over many updates, which begin anew every few of them; as far as time allows.

    The changed one lives on: only its state is given back, so that what it counts goes on.
    """
    begun, few = time.monotonic(), batches[:_APART]
    trajectory = Trajectory(few[:1], seed, float64=True)
    isolation = trajectory.isolated(baseline)
    try:
        next(trajectory.updated(isolation))
    except StepError as error:
        return error.verdict("Close", baseline)
    start = saved(isolation.subject)
    found = algebra(baseline, changed, few, seed)
    each = (time.monotonic() - begun) / len(few)
    count = int(min(updates, seconds / each))
    if not found or count <= len(few):
        return found
    longer = [
        Update(batches[number % len(batches)], start if number % _APART == 0 else None, seed + number)
        for number in range(count)
    ]
    found = algebra(baseline, changed, longer, seed)
    summary = excluded(count) if found else found.summary
    return Verdict(found.outcome, found.contract, summary, found.evidence | {"horizon": count})
