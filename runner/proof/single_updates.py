"""Compares single updates, each from a state that is given."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import partial

from runner.plugin.contract import Close, Exact
from runner.proof.difference import (
    LOADED_TOLERANCE,
    MISSING,
    comparable,
    described,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build
from runner.proof.subject_states import clones, leaves, to_float64
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict


def same_updates(
    baseline: Build,
    changed: Build,
    updates: Iterable[tuple[str, Update]],
    contract: Exact | Close,
    seconds: float = math.inf,
) -> Verdict:
    """Compares bits, or algebra in float64, after each of the updates, as far as time allows.

    Args:
        baseline: Makes the baseline.
        changed: Makes the candidate; one object makes all updates.
        updates: Each with its state, and with words for the message: where in the training it is.
        contract: Determines the comparison.
        seconds: Afterwards no further update starts; the first one is always made.

    Returns:
        The verdict; its evidence has the number of updates under ``single_updates``.
    """
    name = type(contract).__name__
    in_float64 = isinstance(contract, Close)
    criterion = partial(differing, tolerance=LOADED_TOLERANCE) if in_float64 else not_same_bits
    deadline = time.monotonic() + seconds
    count = 0
    try:
        reference = Isolation(baseline, 0, float64=in_float64)
        candidate = Isolation(changed, 0, float64=in_float64)
        parts = shared(reference.subject.state, candidate.subject.state)
        for words, update in updates:
            if count and time.monotonic() > deadline:
                break
            expected = _frame_after(reference, update, in_float64)
            frame = _frame_after(candidate, update, in_float64)
            count += 1
            compared = {location: expected[location] for location in comparable(expected, frame, parts)}
            location = next(criterion(compared, frame), None)
            if location is not None:
                values = expected[location], frame.get(location, MISSING)
                difference = described(count, location, *values)
                summary = f"{words}, an update from the baseline's state has another result: {difference}"
                reproduction = Reproduction(baseline, changed, Trajectory([update], 0, in_float64), 1, name)
                return Verdict(Outcome.FAIL, name, summary, {"difference": difference.data()}, reproduction)
    except StepError as error:
        return error.verdict(name, baseline)
    return Verdict(Outcome.PASS, name, f"{count:,} single updates are the same", {"single_updates": count})


def _frame_after(isolation: Isolation, update: Update, in_float64: bool) -> Frame:
    """Returns what an update returns from its state, and the state after it."""
    isolation.load(update.states or {}, update.seed)
    batch = to_float64(update.batch) if in_float64 else clones(update.batch)
    (output,) = isolation.advance([batch], _outputs)
    return output | isolation.initial()


def _outputs(output: object) -> Frame:
    return {Location(STEP, "output", path or "output"): clones(value) for path, value in leaves(output)}
