"""The contract ``Close``: the same algebra as the baseline, with other rounding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from runner.proof.algebra_check import CONTRACT, NARROWS, algebra
from runner.proof.fingerprints import WHOLE_PROCESS, Fingerprints, fingerprints, leak
from runner.proof.isolation import StepError
from runner.proof.rounding_check import rounding
from runner.proof.subject import Build
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import on_host
from runner.proof.verdict import Outcome, Verdict, worst


def close(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    states: int = 12,
    seed: int = 0,
    further_updates: Sequence[Update] = (),
) -> Verdict:
    """Compares the algebra in float64, and the rounding of single updates.

    Training is chaotic: after some updates rounding alone separates two runs that do the same, so
    runs in float32 are not compared. Instead,

    * both are run in float64 from the same start over all batches, and must stay equal up to 1e-9,
      or 1e-6 as soon as a state was loaded;
    * from states of the baseline's trajectory, both make single updates in their original
      precision. In the median, the changed one's may be at most twice as far from the update in
      float64 as the baseline's, and never more than four times as far as the baseline's largest
      distance. An update that exceeds this is examined again from other states: those of a
      trajectory with the batches in reverse.

    The baseline computes the same trajectory before and after the change is built, and must have
    the same results.

    Arguments and exceptions are those of ``verify``; ``states`` is the largest number of single
    updates, and ``further_updates`` are compared by their algebra alone.
    """
    # The reference is computed before the change is built, which may have side effects.
    reference = _reference(baseline, batches, states, seed)
    same_algebra = algebra(baseline, changed, [*batches, *further_updates], seed)
    # If the baseline itself rounds in float64, it is no reference for single updates either.
    if same_algebra.outcome is Outcome.FAIL or NARROWS in same_algebra.evidence:
        return same_algebra
    repeat = partial(_reference, baseline, batches, states, seed)
    message = leak(
        reference.fingerprints,
        repeat().fingerprints,
        lambda: repeat().fingerprints,
        reference.parts,
    )
    if message is not None:
        evidence = same_algebra.evidence | {WHOLE_PROCESS: True}
        return Verdict(Outcome.FAIL, CONTRACT, message, evidence)
    try:
        rounded = rounding(baseline, changed, reference.starts, seed)
        # A failure may be due to chance, which does not repeat itself from other states.
        if rounded.outcome is Outcome.FAIL:
            reverse = _reference(baseline, [*reversed(batches)], states, seed)
            rounded = rounding(baseline, changed, reverse.starts, seed) or rounded
    except StepError as error:
        rounded = error.verdict(CONTRACT, baseline)
    verdicts = (same_algebra, rounded)
    outcome = worst(verdict.outcome for verdict in verdicts)
    summaries = dict.fromkeys(
        verdict.summary for verdict in verdicts if verdict.outcome is outcome
    )
    evidence = same_algebra.evidence | rounded.evidence
    reproduction = rounded.reproduction
    return Verdict(outcome, CONTRACT, "; ".join(summaries), evidence, reproduction)


class _Reference(NamedTuple):
    """The trajectory of the baseline in its original precision.

    Attributes:
        starts: Evenly spaced updates, by their number, with the state from which they start.
        fingerprints: Fingerprints of the values before each update.
        parts: Names of the parts of the state.
    """

    starts: dict[int, Update]
    fingerprints: Fingerprints
    parts: list[str]


def _reference(
    baseline: Build, batches: Sequence[Any], states: int, seed: int
) -> _Reference:
    trajectory = Trajectory(batches, seed)
    isolation = trajectory.isolated(baseline)
    count = min(states, len(batches))
    last = len(batches) - 1
    positions = {round(number * last / max(1, count - 1)) for number in range(count)}
    reference = _Reference({}, [], list(isolation.subject.state))
    updates = trajectory.updates[: max(positions) + 1]
    frames = trajectory.frames(isolation)
    for position, (update, frame) in enumerate(zip(updates, frames, strict=False)):
        reference.fingerprints.extend(fingerprints([frame]))
        if position in positions:
            number = position + 1
            start = on_host(saved(isolation.subject))
            reference.starts[number] = Update(update.batch, start, seed + number)
    return reference
