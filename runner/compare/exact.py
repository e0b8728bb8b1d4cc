"""The contract ``Exact``: the same bits as the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.compare.isolation import Location, StepError
from runner.compare.subject import Build
from runner.compare.trajectory import (
    Trajectory,
    Update,
    comparable,
    failure,
    locate,
    newly_untrained,
    not_same_bits,
    shared,
)
from runner.compare.values import digests
from runner.compare.verdict import Difference, Outcome, Verdict

CONTRACT = "Exact"
Prints = list[Mapping[Location, bytes]]
"""Fingerprints of all that can be seen before the first update and after each."""


def exact(baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Compares outputs, gradients and state by bits, after every update.

    The baseline is compared with itself first: where it does not repeat itself, nothing can be said. One subject exists
    at a time, two if a difference has to be located.

    Args:
        baseline: makes what to compare with.
        changed: makes what promises the same bits.
        batches: one for each update.
        seed: of the global random generators.

    Raises:
        ValueError: there is no batch, or nothing that could be compared.
        StepError: the baseline itself fails.
    """
    return bitwise(Trajectory([Update(batch) for batch in batches], seed), baseline, changed)


def bitwise(trajectory: Trajectory, baseline: Build, changed: Build) -> Verdict:
    """The same for updates between which states may be loaded.

    The evidence names the parameters that no gradient reaches, other than in the baseline: ``without_gradient``.
    """
    if not trajectory.updates:
        raise ValueError("nothing to compare: there is no batch")
    first, one = _fingerprints(trajectory, baseline)
    again, _ = _fingerprints(trajectory, baseline)
    update = _parting(first, again, one.parts)
    if update is not None:
        return _unstable(update, locate(trajectory, baseline, baseline, update, not_same_bits))
    try:
        prints, other = _fingerprints(trajectory, changed)
        names = shared(one.parts, other.parts)
        update = _parting(first, prints, names)
        found = None if update is None else locate(trajectory, baseline, changed, update, not_same_bits)
    except StepError as error:
        return Verdict(Outcome.FAIL, CONTRACT, failure(error), {"updates": error.update})
    count = len(list(comparable(first[-1], prints[-1], names)))
    evidence = {
        "updates": len(trajectory.updates),
        "tensors": count,
        "not_compared": sorted({*one.parts, *other.parts} - {*names}),
        "without_gradient": newly_untrained(one.untrained, other.untrained),
    }
    if update is None:
        summary = f"{count:,} outputs, gradients and parts of the state have the same bits"
        return Verdict(Outcome.PASS, CONTRACT, f"{summary} after each of {len(trajectory.updates)} updates", evidence)
    if found is None:
        return _unstable(update, None)
    return Verdict(Outcome.FAIL, CONTRACT, f"not the same bits: {found}", evidence | {"difference": found.data()})


@dataclass(frozen=True)
class _Seen:
    """What is left to know of a subject that is gone."""

    parts: list[str]
    """Names of the parts of its state."""
    untrained: dict[str, str]


def _fingerprints(trajectory: Trajectory, build: Build) -> tuple[Prints, _Seen]:
    isolation = trajectory.isolated(build)
    prints: Prints = [digests(frame) for frame in trajectory.frames(isolation)]
    return prints, _Seen(list(isolation.subject.state), isolation.untrained)


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
