"""Compares single updates, each from a given state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from runner.plugin.contract import Close, Exact
from runner.proof.difference import (
    LOADED_TOLERANCE,
    compared_values,
    describe_first,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.isolation import (
    Frame,
    Isolation,
    Location,
    StepError,
    copy_outputs,
)
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import clones, to_float64
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
        updates: Updates with their states, and with words for the message: their position in the
            training.
        contract: Determines the comparison.
        seconds: Afterwards no further update starts; the first one is always made.

    Returns:
        The verdict; its evidence has the number of updates under ``single_updates``.
    """
    name = type(contract).__name__
    in_float64 = isinstance(contract, Close)
    criterion: Callable[[Frame, Frame], Iterator[Location]] = not_same_bits
    if in_float64:
        criterion = partial(differing, tolerance=LOADED_TOLERANCE)
    deadline = time.monotonic() + seconds
    count = 0
    try:
        # One subject makes all updates, so that caches between updates have their effect.
        reference = Isolation(baseline, 0, float64=in_float64)
        candidate = Isolation(changed, 0, float64=in_float64)
        parts = shared(reference.subject.state, candidate.subject.state)
        for words, update in updates:
            if count and time.monotonic() > deadline:
                break
            expected = _frame_after(reference, update, in_float64)
            actual = _frame_after(candidate, update, in_float64)
            count += 1
            compared = compared_values(expected, actual, parts)
            locations = criterion(compared, actual)
            difference = describe_first(count, compared, actual, locations)
            if difference is None:
                continue
            state = "from the baseline's state"
            summary = f"{words}, an update {state} has another result: {difference}"
            trajectory = Trajectory([update], 0, in_float64)
            reproduction = Reproduction(baseline, changed, trajectory, 1, name)
            return reproduction.fail(summary, difference)
    except StepError as error:
        return error.verdict(name, baseline)
    summary = f"{count:,} single updates are the same"
    return Verdict(Outcome.PASS, name, summary, {"single_updates": count})


def _frame_after(isolation: Isolation, update: Update, in_float64: bool) -> Frame:
    """Returns what an update returns from its state, and the state after it."""
    isolation.load(update.states or {}, update.seed)
    batch = to_float64(update.batch) if in_float64 else clones(update.batch)
    (output,) = isolation.advance([batch], copy_outputs)
    return output | isolation.initial()
