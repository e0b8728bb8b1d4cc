"""The contract ``Close``: the same algebra as the baseline, with other rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from runner.compare.float64 import Narrowing, NotFloat64Error, float64_build, float64_trajectory, narrowing
from runner.compare.isolation import Frame, StepError
from runner.compare.rounding import rounding
from runner.compare.subject import Build
from runner.compare.tolerance import TOLERANCE, differing
from runner.compare.trajectory import Trajectory, Update, comparable, locate, newly_untrained, shared
from runner.compare.verdict import Outcome, Verdict, worst

CONTRACT = "Close"
NARROWS = "narrows"
"""Under this name, evidence says where the baseline rounds its float64 numbers."""


def close(baseline: Build, changed: Build, batches: Sequence[Any], states: int = 12, seed: int = 0) -> Verdict:
    """Compares the algebra in float64, and the rounding of single updates.

    Training is chaotic: after some updates rounding alone separates two runs that do the same, so runs in float32 are
    not compared. Instead,

    * both are run in float64 from the same start over all batches, and must stay equal up to 1e-9;
    * from states on the way of the baseline, single updates are taken by both in their own precision, and the changed
      one's may be at most twice as far from the update in float64 as the baseline's, in the median.

    Args:
        baseline: makes what to compare with.
        changed: makes what promises the same algebra.
        batches: one for each update.
        states: how many single updates; fewer if there are fewer batches.
        seed: of the global random generators.

    Raises:
        ValueError: there is no batch, or nothing that could be compared.
        StepError: the baseline itself fails.
    """
    if not batches:
        raise ValueError("nothing to compare: there is no batch")
    trajectory = float64_trajectory([Update(batch) for batch in batches], seed)
    return close_to(algebra(trajectory, baseline, changed), baseline, changed, batches, states, seed)


def close_to(
    same_algebra: Verdict, baseline: Build, changed: Build, batches: Sequence[Any], states: int = 12, seed: int = 0
) -> Verdict:
    """The same with the algebra judged already."""
    if same_algebra.outcome is Outcome.FAIL or NARROWS in same_algebra.evidence:  # then float64 tells no truth either
        return same_algebra
    rounded = rounding(baseline, changed, batches, states, seed)
    if same_algebra.outcome is rounded.outcome is Outcome.INCONCLUSIVE:
        return same_algebra
    outcome = worst([same_algebra.outcome, rounded.outcome])
    summaries = [each.summary for each in (same_algebra, rounded) if each.outcome is outcome]
    return Verdict(outcome, CONTRACT, "; ".join(summaries), same_algebra.evidence | rounded.evidence)


def algebra(trajectory: Trajectory, baseline: Build, changed: Build) -> Verdict:
    """Whether two subjects, both in float64, stay equal up to rounding.

    The evidence names the parameters that no gradient reaches, other than in the baseline: ``without_gradient``.

    Args:
        trajectory: the updates, in float64.
        baseline: makes what to compare with.
        changed: makes what promises the same algebra.
    """
    builds = float64_build(baseline), float64_build(changed)
    try:
        update, untrained, seen = _parting(trajectory, *builds)
        evidence = {"updates": len(trajectory.updates), "tolerance": TOLERANCE, "without_gradient": untrained}
        if update is None:
            summary = f"the same algebra over {len(trajectory.updates)} updates in float64"
            return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
        if _parting(trajectory, builds[0], builds[0]).update is not None:
            summary = "the baseline is not the same twice, in float64 with the same seeds; make it deterministic"
            return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
        narrows = narrowing(trajectory.isolated(builds[0]), trajectory.updates[0].batch)
        if narrows is not None and _is_of_its_size(narrows, *seen):
            return Verdict(Outcome.INCONCLUSIVE, CONTRACT, str(narrows), {"update": update, NARROWS: narrows.where})
        found = locate(trajectory, *builds, update, differing)
    except NotFloat64Error as error:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, str(error))
    if found is None:
        summary = f"the difference after update {update} in float64 did not come again; make the step deterministic"
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
    summary = f"not the same algebra: in float64, {found}"
    return Verdict(Outcome.FAIL, CONTRACT, summary, evidence | {"difference": found.data()})


class _Parting(NamedTuple):
    update: int | None
    """None if the two do not differ."""
    untrained: dict[str, str]
    """Which parameters only the changed one has not trained by then."""
    frames: tuple[Frame, Frame]
    """What could be seen of both."""


def _parting(trajectory: Trajectory, baseline: Build, changed: Build) -> _Parting:
    """The first update after which the two differ by more than rounding; both move step by step.

    Raises:
        NotFloat64Error: one of them cannot be stepped in float64.
    """
    isolations = [trajectory.isolated(build) for build in (baseline, changed)]
    names = shared(*(isolation.subject.state for isolation in isolations))
    sequences = [trajectory.frames(isolation) for isolation in isolations]
    for update in range(len(trajectory.updates) + 1):
        try:
            one, other = (next(sequence) for sequence in sequences)
        except StepError as error:
            who = "the baseline" if error.isolation is isolations[0] else "the changed step"
            raise NotFloat64Error.stepping(who, error) from error
        seen = {location: one[location] for location in comparable(one, other, names)}
        if any(True for _ in differing(seen, other)):
            return _Parting(update, newly_untrained(*(each.untrained for each in isolations)), (seen, other))
    return _Parting(None, newly_untrained(*(each.untrained for each in isolations)), (seen, other))


def _is_of_its_size(narrows: Narrowing, baseline: Frame, changed: Frame) -> bool:
    """Whether outputs and gradients differ, and by no more than what the baseline rounds away."""
    computed = {location: value for location, value in baseline.items() if location.kind != "state"}
    differs, differs_more = (
        any(True for _ in differing(computed, changed, tolerance)) for tolerance in (TOLERANCE, narrows.tolerance)
    )
    return differs and not differs_more
