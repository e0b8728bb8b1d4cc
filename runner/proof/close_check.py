"""The contract ``Close``: the same algebra as the baseline, with other rounding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof import difference
from runner.proof.difference import LOADED_TOLERANCE, TOLERANCE, Difference, differing
from runner.proof.fingerprints import (
    WHOLE_PROCESS,
    Prints,
    SideEffects,
    fingerprints,
    leak,
    observed,
    side_effects,
)
from runner.proof.isolation import Frame, Location, StepError
from runner.proof.modes import Casts, OtherFormat, Sums
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import MOST_ULPS, Inaccuracy, inaccuracies
from runner.proof.sensitivity import Sensitivity
from runner.proof.subject import Build
from runner.proof.subject_states import named_parameters, on_host, saved, to_float64
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict, worst
from runner.system.tensor_trees import map_tensors

CONTRACT = "Close"
# Key of the evidence for the operation where the baseline rounds its float64 numbers.
NARROWS = "narrows"
SYSTEMATIC = "smallest_systematic_error"  # as a share of an update, in the evidence
ALLOWED = 2.0  # how many times as far from the truth as the baseline, in the median
ALLOWED_ONCE = 4.0  # and in any single update, of the baseline's largest error in one
# Smaller errors are luck, and count as this number of units.
FEWEST_ULPS = {"output": 4, "gradient": 1, "state": 1}
FACTOR_ULPS = 8.0  # by which all gradients together, or all outputs, may be too long
FOREIGN, FOREIGN_AND_RANDOM = 0.1, 1e-3  # from such an error of the baseline on, its update in float64 is another one


def close(
    baseline: Build, changed: Build, batches: Sequence[Any], states: int = 12, seed: int = 0,
    turns: Sequence[Update] = (),
) -> Verdict:  # fmt: skip
    """Compares the algebra in float64, and the rounding of single updates.

    Training is chaotic: after some updates rounding alone separates two runs that do the same, so runs in float32 are
    not compared. Instead,

    * both are run in float64 from the same start over all batches, and must stay equal up to 1e-9,
      or 1e-6 as soon as a state was loaded;
    * from states of the baseline's trajectory, both make single updates in their original
      precision. In the median, the changed one's may be at most twice as far from the update in
      float64 as the baseline's, and never more than four times as far as the baseline's largest
      distance. An update that exceeds this is examined again from other states: those of a
      trajectory with the batches in reverse.

    The baseline computes the same trajectory before and after the change is built, and must have
    the same results.

    Arguments and exceptions are those of ``verify``; ``states`` is how many single updates are taken at most, and
    ``turns`` are further updates for the algebra alone.
    """
    way = _reference(baseline, batches, states, seed)
    same_algebra = algebra(baseline, changed, [*batches, *turns], seed)
    # Then float64 is not a reference either.
    if same_algebra.outcome is Outcome.FAIL or NARROWS in same_algebra.evidence:
        return same_algebra
    anew = partial(_reference, baseline, batches, states, seed)
    reached = leak(way.prints, anew().prints, lambda: anew().prints, way.parts)
    if reached is not None:
        return Verdict(Outcome.FAIL, CONTRACT, reached, same_algebra.evidence | {WHOLE_PROCESS: True})
    try:
        rounded = rounding(baseline, changed, way.starts, seed)
        if rounded.outcome is Outcome.FAIL:  # possibly by chance, which is not repeated
            other = _reference(baseline, [*reversed(batches)], states, seed)
            rounded = rounding(baseline, changed, other.starts, seed) or rounded
    except StepError as error:
        rounded = error.verdict(CONTRACT, baseline)
    outcome = worst([same_algebra.outcome, rounded.outcome])
    summaries = dict.fromkeys(each.summary for each in (same_algebra, rounded) if each.outcome is outcome)
    evidence = same_algebra.evidence | rounded.evidence
    return Verdict(outcome, CONTRACT, "; ".join(summaries), evidence, rounded.reproduction)


def algebra(baseline: Build, changed: Build, batches: Sequence[Any], seed: int = 0) -> Verdict:
    """Returns whether two subjects, both in float64, stay equal up to rounding; the
    evidence has ``side_effects``.
    """
    trajectory = Trajectory(batches, seed, float64=True)
    try:
        update, told, seen, other, prints = _parting(trajectory, baseline, changed)
        evidence = {"updates": len(batches), "tolerance": TOLERANCE, **told}
        if update is None:
            alone = partial(observed, trajectory, baseline)
            own, effects = alone()
            if reached := leak(prints, own, lambda: alone()[0], effects.parts):
                return Verdict(Outcome.FAIL, CONTRACT, reached, evidence | {WHOLE_PROCESS: True})
            summary = f"the same algebra over {len(batches)} updates in float64"
            if smallest := evidence.get(SYSTEMATIC):
                summary += f", which shows an error above {smallest:.0e} of each update"
            return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
        again, *_ = _parting(trajectory, baseline, baseline)
        if again is not None:
            summary = "the baseline is not the same twice, in float64 with the same seeds; make it deterministic"
            return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
        isolation = trajectory.isolated(baseline)
        with Casts() as casts:  # type: ignore[no-untyped-call]
            next(trajectory.updated(isolation))
        computed = {location: value for location, value in seen.items() if location.kind != "state"}
        if casts.explain(computed, other):
            summary = (
                f"the algebra cannot be compared: in float64 the baseline itself rounds to {casts.narrowest} "
                f"({casts.where}); cast to the wider of two types there, torch.promote_types(x.dtype, torch.float32)"
            )
            return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update, NARROWS: casts.where})
        criterion = partial(differing, tolerance=_tolerance(trajectory, update))
        found = difference.locate(trajectory, baseline, changed, update, criterion)
    except StepError as error:
        return error.verdict(CONTRACT, baseline)
    if found is None:
        summary = f"the difference after update {update} in float64 did not come again; make the step deterministic"
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, {"update": update})
    summary = f"not the same algebra: in float64, {found}"
    reproduction = Reproduction(baseline, changed, trajectory, update, CONTRACT)
    return Verdict(Outcome.FAIL, CONTRACT, summary, evidence | {"difference": found.data()}, reproduction)


def _parting(
    trajectory: Trajectory, baseline: Build, changed: Build
) -> tuple[int | None, dict[str, Any], Frame, Frame, Prints]:
    """The first update after which the two, moving step by step, differ by more than rounding; None if they do not.

    Also returns evidence in addition to the numbers, the visible values of both, and
    the baseline's fingerprints.
    """
    isolations = [trajectory.isolated(build) for build in (baseline, changed)]
    names = difference.shared(*(isolation.subject.state for isolation in isolations))
    parted, prints, jogged = None, list[dict[Location, bytes]](), enumerate(_jogged(trajectory, baseline))
    told: dict[str, Any] = {}
    sensitivity: Sensitivity | None = None
    loaded = [number for number, update in enumerate(trajectory.updates) if update.states is not None]
    steady = min(loaded, default=len(trajectory.updates))
    for update, (one, other) in enumerate(zip(*map(trajectory.frames, isolations), strict=True)):
        prints += fingerprints([one])
        seen = {location: one[location] for location in difference.comparable(one, other, names)}
        tolerance = _tolerance(trajectory, update)
        sensitivity = sensitivity or Sensitivity(seen)
        if update == steady > 0:
            told[SYSTEMATIC] = sensitivity.smallest_error(seen)
        if any(differing(seen, other, tolerance)):
            moved = next(frame for number, frame in jogged if number == update)
            if any(differing(seen, other, tolerance, moved)):
                parted = update
                break
    told |= side_effects(*map(SideEffects.of, isolations))
    return parted, told, seen, other, prints


def _jogged(trajectory: Trajectory, baseline: Build) -> Iterator[Frame]:
    """The baseline's way from states whose numbers are up to a unit off: where rounding alone takes it."""
    isolation = trajectory.isolated(baseline)
    isolation.load(map_tensors(jog, saved(isolation.subject)))
    updates = [replace(each, states=map_tensors(jog, to_float64(each.states))) for each in trajectory.updates]
    yield from replace(trajectory, batches=updates).frames(isolation)


def jog(tensor: Tensor) -> Tensor:
    """The tensor with numbers that are up to a unit off, always by the same."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        return tensor
    by = torch.rand(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(tensor.numel()))
    return tensor * (1 + (2 * by - 1) * torch.finfo(tensor.dtype).eps).to(tensor.device)


def _tolerance(trajectory: Trajectory, update: int) -> float:
    """Returns the tolerance after an update, which depends on whether a state was loaded before."""
    loaded = any(each.states is not None for each in trajectory.updates[:update])
    return LOADED_TOLERANCE if loaded else TOLERANCE


def rounding(baseline: Build, changed: Build, starts: Mapping[int, Update], seed: int) -> Verdict:
    """Takes single updates from states on the baseline's way, and compares how far each is from its float64 twin."""
    trajectory, in_float64 = (Trajectory([*starts.values()], seed, float64) for float64 in (False, True))
    unrounded, isolation = in_float64.isolated(baseline), trajectory.isolated(baseline)
    truth = [on_host(frame) for frame in in_float64.updated(unrounded)]
    own = inaccuracies(truth, trajectory.updated(isolation))
    foreign = _foreign([each.by_group for each in own], not isolation.draws_as(unrounded))
    if foreign is not None:
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, foreign, {"states": len(starts)})
    types = {parameter.dtype for parameter in named_parameters(isolation.subject).values()}
    precision = max(torch.finfo(dtype).eps for dtype in types or {torch.get_default_dtype()})
    other = trajectory.isolated(changed)
    parts = difference.shared(isolation.subject.state, other.subject.state)
    theirs = inaccuracies(truth, trajectory.updated(other))
    errors = _errors(own, theirs)
    units = 1.0
    ratios, beyond = _ratios(errors, precision, units)
    # Possibly because the baseline sums with more digits than its numbers have.
    if _first_beyond(ratios, beyond):
        units = _units_of_sums(baseline, in_float64)
        ratios, beyond = _ratios(errors, precision, units)
    # Or because its kernels have more digits in its memory format than in the other.
    if _first_beyond(ratios, beyond):
        relaid = _relaid(baseline, trajectory, truth)
        ratios, beyond = _ratios(_errors(_larger(own, relaid), theirs), precision, units)
    medians = {group: statistics.median(each) for group, each in ratios.items()}
    largest = {group: max(each) for group, each in beyond.items()}
    told, at_worst = (
        {group_name(group): difference.plain(each) for group, each in found.items()} for found in (medians, largest)
    )
    evidence = {"states": len(starts), "rounding": told, "largest": at_worst}
    count = f"the median of {len(starts)} single updates"
    failed = _first_beyond(ratios, beyond)
    systematic = _systematic(own, theirs, precision) if failed is None and units > 1 else None
    if systematic is not None:
        update, start = next(iter(starts.items()))
        found = _locate_rounding(baseline, changed, update, start, parts, precision, 1.0, seed)
        reproduction = Reproduction(baseline, changed, Trajectory([start], seed), 1, CONTRACT)
        return Verdict(
            Outcome.FAIL, CONTRACT, f"{systematic}: {found}", evidence | {"difference": found.data()}, reproduction
        )
    if failed is None:
        summary = f"at most {max(medians.values()):.2g} times the baseline's rounding in {count}"
        return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
    often = medians[failed] > ALLOWED
    by_update = (ratios if often else beyond)[failed]
    update, start = max(zip(starts.items(), by_update, strict=False), key=itemgetter(1))[0]
    found = _locate_rounding(baseline, changed, update, start, parts, precision, units, seed)
    times, where = (medians, count) if often else (largest, f"one of {len(starts)} single updates")
    summary = f"rounds {times[failed]:.2g} times as much as the baseline ({group_name(failed)}, {where}): {found}"
    reproduction = Reproduction(baseline, changed, Trajectory([start], seed), 1, CONTRACT)
    return Verdict(Outcome.FAIL, CONTRACT, summary, evidence | {"difference": found.data()}, reproduction)


def _errors(
    own: Sequence[Inaccuracy], theirs: Sequence[Inaccuracy]
) -> dict[Location, list[tuple[float, float, float]]]:
    """The errors of each group in every update: the baseline's, the changed one's, and that by usual sizes."""
    return {
        group: [
            (one.by_group[group], each.by_group[group], each.by_usual_size.get(group, math.inf))
            for one, each in zip(own, theirs, strict=True)
            if group in one.by_group
        ]
        for group in own[-1].by_group
        if group in theirs[-1].by_group
    }


def _relaid(baseline: Build, trajectory: Trajectory, truth: Sequence[Frame]) -> list[Inaccuracy]:
    """Returns the errors of the baseline with images in the other memory format; none
    if it has no images.

    Normalisations and convolutions have a kernel for each format, which do not add up with the same digits. What the
    baseline itself loses by the other kernel is rounding of a changed one, too.
    """
    isolation = trajectory.isolated(baseline)
    with OtherFormat() as other:
        found = inaccuracies(truth, trajectory.updated(isolation))
    return found if other.format is not None else []


def _larger(own: Sequence[Inaccuracy], others: Sequence[Inaccuracy]) -> list[Inaccuracy]:
    """Returns the larger errors of two series of updates; the second may be empty."""
    if not others:
        return list(own)
    return [
        one._replace(
            by_group={group: max(error, other.by_group.get(group, 0.0)) for group, error in one.by_group.items()}
        )
        for one, other in zip(own, others, strict=True)
    ]


def _systematic(own: Sequence[Inaccuracy], theirs: Sequence[Inaccuracy], precision: float) -> str | None:
    """Returns a message if gradients or outputs have a common factor beyond rounding, in the median
    of all updates.
    """
    for kind in theirs[0].factors:
        mine, factor = (abs(statistics.median(each.factors.get(kind, 0.0) for each in one)) for one in (own, theirs))
        if factor > ALLOWED * max(mine, FACTOR_ULPS * precision):
            return f"all {kind}s are off by the factor {factor:.2g} in the median of {len(theirs)} single updates"
    return None


def _ratios(
    errors: Mapping[Location, Sequence[tuple[float, float, float]]], precision: float, units: float
) -> tuple[dict[Location, list[float]], dict[Location, list[float]]]:
    """Returns the ratios of the changed one's errors, per update: to the baseline's error there,
    and to its largest.

    That the baseline is lucky in one update is not held against the change. Where outputs are furthest off, they are
    measured by their usual size: one that passes zero there has none.
    """
    once, beyond = dict[Location, list[float]](), dict[Location, list[float]]()
    for group, found in errors.items():
        once[group] = [_ratio(group, own, error, precision, units) for own, error, _ in found]
        worst_own, theirs = max(own for own, *_ in found), [error for _, error, _ in found]
        furthest = theirs.index(max(theirs))
        theirs[furthest] = min(found[furthest][1:])
        beyond[group] = [_ratio(group, worst_own, error, precision, units) for error in theirs]
    return once, beyond


def _first_beyond(ratios: Mapping[Location, list[float]], beyond: Mapping[Location, list[float]]) -> Location | None:
    """A group that is too far off in the median, or else in one update."""
    often = (group for group, each in ratios.items() if statistics.median(each) > ALLOWED)
    return next(often, next((group for group, each in beyond.items() if max(each) > ALLOWED_ONCE), None))


def _units_of_sums(baseline: Build, in_float64: Trajectory) -> float:
    """Returns the units by which a sum in the precision of its numbers may be off, in any order.

    The rounding of n terms grows as the root of n. Some kernels add up with more digits, others of the same operation
    do not (batch normalisation on a CPU, by the memory format): neither is wrong.
    """
    isolation = in_float64.isolated(baseline)
    with Sums() as sums:  # type: ignore[no-untyped-call]
        next(in_float64.updated(isolation))
    return min(math.sqrt(sums.terms), MOST_ULPS)


class _Reference(NamedTuple):
    """The trajectory of the baseline in its original precision."""

    starts: dict[int, Update]  # updates, spread evenly, by their number, with the state from which they start
    prints: Prints
    parts: list[str]  # of the state


def _reference(baseline: Build, batches: Sequence[Any], states: int, seed: int) -> _Reference:
    way = Trajectory(batches, seed)
    isolation = way.isolated(baseline)
    count = min(states, len(batches))
    chosen = {round(i * (len(batches) - 1) / max(1, count - 1)) for i in range(count)}
    found = _Reference({}, [], list(isolation.subject.state))
    for i, (update, frame) in enumerate(zip(way.updates[: max(chosen) + 1], way.frames(isolation), strict=False)):
        found.prints.extend(fingerprints([frame]))
        if i in chosen:
            found.starts[i + 1] = Update(update.batch, on_host(saved(isolation.subject)), seed + i + 1)
    return found


def _foreign(errors: Sequence[Mapping[Location, float]], random: bool) -> str | None:
    """Why the updates in float64 cannot serve as the truth; None if they can."""
    groups = dict.fromkeys(group for each in errors for group in each if group.kind != "state")
    medians = (statistics.median(each.get(group, 0.0) for each in errors) for group in groups)
    largest = max(medians, default=0.0)
    if math.isfinite(largest) and largest <= (FOREIGN_AND_RANDOM if random else FOREIGN):
        return None
    why = "is not finite, or computes something else there"
    if random:
        why = "draws random numbers inside the step; draw them before and hand them in with the batch"
    return f"the rounding cannot be compared: in float64 the baseline comes out otherwise by {largest:.2g}; it {why}"


def _ratio(location: Location, own: float, other: float, precision: float, units: float) -> float:
    """Returns how many times larger the other error is."""
    least = max(FEWEST_ULPS[location.kind], units) * precision
    return max(other, least) / max(own, least)


def group_name(group: Location) -> str:
    """Returns the name of a group of numbers that share a size."""
    return {"output": "outputs", "gradient": "gradients", "state": f"'{group.name}' of the state"}[group.kind]


def _locate_rounding(
    baseline: Build, changed: Build, update: int, start: Update, parts: Sequence[str], precision: float, units: float,
    seed: int,
) -> Difference:  # fmt: skip
    """Takes one update again, with slots that show what they return, to find the first that is too far off."""
    truth, _ = Trajectory([start], seed, float64=True).watched(baseline, 1)
    (own, _), (theirs, _) = (Trajectory([start], seed).watched(build, 1) for build in (baseline, changed))
    seen = {location: truth[location] for location in difference.in_order(truth, theirs, parts) if location in truth}
    mine = difference.relative_errors(seen, own)
    ratios = {
        location: _ratio(location, mine.get(location, 0.0), error, precision, units)
        for location, error in difference.relative_errors(seen, theirs).items()
    }
    location = next((each for each, ratio in ratios.items() if ratio > ALLOWED), max(ratios, key=ratios.__getitem__))
    exact, value = truth[location], theirs[location]
    error = difference.absolute_difference(exact, value)
    assert error is not None  # otherwise it would have no ratio
    # An element differs if it is further off than rounding the truth would be.
    eps = torch.finfo(value.dtype if isinstance(value, Tensor) else torch.float64).eps
    return difference.measured(update, location, exact, error, error > eps * difference.as_float64(exact).abs())
