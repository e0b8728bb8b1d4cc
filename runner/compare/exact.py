"""The contract ``Exact``: the same bits as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.compare.difference import Difference, comparable, digest, locate, newly_untrained, not_same_bits, shared
from runner.compare.isolation import Location, StepError, Trajectory
from runner.compare.subject import Build
from runner.compare.verdict import Outcome, Verdict

CONTRACT = "Exact"
Prints = list[dict[Location, bytes]]  # fingerprints of all that can be seen before the first update and after each


def exact(baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Compares outputs, gradients and state by bits, after every update.

    The baseline is compared with itself first: where it does not repeat itself, nothing can be said. One subject exists
    at a time, two if a difference has to be located. Arguments and exceptions are those of ``verify``. The evidence
    names the parameters that no gradient reaches, other than in the baseline: ``without_gradient``.
    """
    trajectory = Trajectory(batches, seed)
    try:
        first, parts, excused = _fingerprints(trajectory, baseline)
        again, *_ = _fingerprints(trajectory, baseline)
        update = _parting(first, again, parts)
        if update is not None:
            return _unstable(update, locate(trajectory, baseline, baseline, update, not_same_bits))
        prints, changed_parts, untrained = _fingerprints(trajectory, changed)
        names = shared(parts, changed_parts)
        update = _parting(first, prints, names)
        found = None if update is None else locate(trajectory, baseline, changed, update, not_same_bits)
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    count = len(list(comparable(first[-1], prints[-1], names)))
    evidence = {
        "updates": len(batches), "tensors": count, "not_compared": sorted({*parts, *changed_parts} - {*names}),
        "without_gradient": newly_untrained(excused, untrained),
    }  # fmt: skip
    if update is None:
        summary = f"{count:,} outputs, gradients and parts of the state have the same bits"
        return Verdict(Outcome.PASS, CONTRACT, f"{summary} after each of {len(batches)} updates", evidence)
    if found is None:
        return _unstable(update, None)
    return Verdict(Outcome.FAIL, CONTRACT, f"not the same bits: {found}", evidence | {"difference": found.data()})


def _fingerprints(trajectory: Trajectory, build: Build) -> tuple[Prints, list[str], dict[str, str]]:
    """What is left to know of a subject that is gone; with the parts of its state, and parameters without gradient."""
    isolation = trajectory.isolated(build)
    prints = [{location: digest(value) for location, value in frame.items()} for frame in trajectory.frames(isolation)]
    return prints, list(isolation.subject.state), isolation.untrained


def _parting(one: Prints, other: Prints, states: Sequence[str]) -> int | None:
    """The first update after which not all is the same."""
    for update, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if any(mine[location] != theirs.get(location) for location in comparable(mine, theirs, states)):
            return update
    return None


def _unstable(update: int, found: Difference | None) -> Verdict:
    where = f"update {update}, not always in the same place" if found is None else str(found)
    summary = f"the same is not the same twice: {where}; make it deterministic (torch.use_deterministic_algorithms)"
    evidence = {"update": update, "difference": found and found.data()}
    return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, evidence)
