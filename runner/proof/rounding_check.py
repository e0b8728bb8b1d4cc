"""Compares the rounding of single updates: the distances of two subjects from float64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.contract import Close
from runner.proof import difference
from runner.proof.difference import Difference
from runner.proof.isolation import Frame, Location
from runner.proof.modes import OtherFormat, Sums
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import (
    MOST_ULPS,
    Precisions,
    RoundingErrors,
    parameter_types,
    precisions,
    rounding_errors,
    value_types,
)
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import on_host
from runner.proof.verdict import Outcome, Verdict
from runner.system.stored_json import json_number
from runner.system.tensor_trees import as_float64

CONTRACT = Close.__name__
# How many times as far from the truth as the baseline a change may be, in the median.
ALLOWED = 2.0
# How many times the baseline's largest error in one update a change may be off in any update.
ALLOWED_ONCE = 4.0
# Smaller errors are luck, and count as this number of units.
FEWEST_ULPS = {"output": 4, "gradient": 1, "state": 1}
# Units by which all gradients together, or all outputs, may be too long.
FACTOR_ULPS = 8.0
# From such an error of the baseline on, its update in float64 computes something else.
FOREIGN = 0.1
FOREIGN_AND_RANDOM = 1e-3


class _ErrorPair(NamedTuple):
    """The errors of a group in one update.

    Attributes:
        baseline: The baseline's error.
        candidate: The changed one's error.
        by_usual_size: The changed one's error as a share of the usual size of an output.
    """

    baseline: float
    candidate: float
    by_usual_size: float


class _Ratios(NamedTuple):
    """Ratios of the changed one's errors to the baseline's, by group, one for each update.

    Attributes:
        in_update: To the baseline's error in the same update.
        to_largest: To the baseline's largest error in any update.
    """

    in_update: dict[Location, list[float]]
    to_largest: dict[Location, list[float]]

    @property
    def medians(self) -> dict[Location, float]:
        """Returns the median of each group."""
        return {
            group: statistics.median(ratios) for group, ratios in self.in_update.items()
        }

    @property
    def maxima(self) -> dict[Location, float]:
        """Returns the largest ratio of each group."""
        return {group: max(ratios) for group, ratios in self.to_largest.items()}

    def exceeding(self) -> Location | None:
        """Returns a group that is too far off in the median, or else in one update."""
        for group, ratio in self.medians.items():
            if ratio > ALLOWED:
                return group
        for group, ratio in self.maxima.items():
            if ratio > ALLOWED_ONCE:
                return group
        return None


@dataclass(frozen=True)
class _Pair:
    """Two subjects whose rounding is compared.

    Attributes:
        baseline: Makes the baseline.
        changed: Makes the candidate.
        seed: Of the global random generators.
        parts: Names of the parts of the state that both have.
        precisions: Of the baseline's numbers.
    """

    baseline: Build
    changed: Build
    seed: int
    parts: Sequence[str]
    precisions: Precisions

    def fail(
        self,
        message: str,
        numbered: tuple[int, Update],
        units: float,
        evidence: dict[str, Any],
    ) -> Verdict:
        """Returns a FAIL with the first value of an update that is too far off."""
        update, start = numbered
        first_difference = self._locate(update, start, units)
        trajectory = Trajectory([start], self.seed)
        reproduction = Reproduction(
            self.baseline, self.changed, trajectory, 1, CONTRACT
        )
        summary = f"{message}: {first_difference}"
        return reproduction.fail(summary, first_difference, evidence)

    def _locate(self, update: int, start: Update, units: float) -> Difference:
        """Repeats one update with observed slots, to find the first value that is too far off."""
        in_float64 = Trajectory([start], self.seed, float64=True)
        trajectory = Trajectory([start], self.seed)
        truth, _ = in_float64.watched(self.baseline, 1)
        expected, _ = trajectory.watched(self.baseline, 1)
        actual, _ = trajectory.watched(self.changed, 1)
        exact_values = {
            location: truth[location]
            for location in difference.in_order(truth, actual, self.parts)
            if location in truth
        }
        types = self.precisions.types
        baseline_errors = difference.relative_errors(
            exact_values, expected, types=types
        )
        errors = difference.relative_errors(exact_values, actual, types=types)
        ratios = {
            location: _ratio(
                location,
                baseline_errors.get(location, 0.0),
                error,
                self.precisions.of(location),
                units,
            )
            for location, error in errors.items()
        }
        exceeding = (location for location, ratio in ratios.items() if ratio > ALLOWED)
        location = next(exceeding, max(ratios, key=ratios.__getitem__))
        exact = truth[location]
        value = actual[location]
        distance = difference.absolute_difference(exact, value)
        # Values that cannot be subtracted have no ratio.
        assert distance is not None
        # An element differs if it is further off than rounding the truth would be.
        dtype = value.dtype if isinstance(value, Tensor) else torch.float64
        rounding = torch.finfo(dtype).eps * as_float64(exact).abs()
        differs = distance > rounding
        return difference.measured(update, location, exact, distance, differs)


def rounding(
    baseline: Build, changed: Build, starts: Mapping[int, Update], seed: int
) -> Verdict:
    """Compares single updates from states of the baseline's trajectory by their distance from
    the same updates in float64.
    """
    # The same updates in both precisions, from the same states.
    updates = [*starts.values()]
    trajectory = Trajectory(updates, seed)
    in_float64 = Trajectory(updates, seed, float64=True)
    exact = in_float64.isolated(baseline)
    reference = trajectory.isolated(baseline)
    truth = [on_host(frame) for frame in in_float64.updated(exact)]
    parameters = parameter_types(reference.subject)
    types = {}
    if len(parameters) > 1:
        types = value_types(trajectory.updated(reference))
    baseline_errors = rounding_errors(truth, trajectory.updated(reference), types)
    is_random = not reference.draws_as(exact)
    foreign = _foreign([errors.by_group for errors in baseline_errors], is_random)
    if foreign is not None:
        evidence = {"states": len(starts)}
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, foreign, evidence)

    precision = precisions(baseline_errors, parameters, types)
    candidate = trajectory.isolated(changed)
    parts = difference.shared(reference.subject.state, candidate.subject.state)
    pair = _Pair(baseline, changed, seed, parts, precision)
    candidate_errors = rounding_errors(truth, trajectory.updated(candidate), types)
    yardstick = baseline_errors
    errors = _paired(yardstick, candidate_errors)
    units = 1.0
    ratios = _ratios(errors, precision, units)
    # Possibly because the baseline sums with more digits than its numbers have.
    if ratios.exceeding():
        units = _units_of_sums(baseline, in_float64)
        ratios = _ratios(errors, precision, units)
    # Where sums are allowed more units, a factor of all values together may be within them.
    has_sums = units > 1
    systematic = (
        _systematic(yardstick, candidate_errors, precision) if has_sums else None
    )
    # Or because its kernels have more digits in its memory format than in the other.
    if ratios.exceeding() or systematic:
        relaid = _errors_in_other_format(baseline, trajectory, truth, types)
        yardstick = _larger(baseline_errors, relaid)
        ratios = _ratios(_paired(yardstick, candidate_errors), precision, units)
    if ratios.exceeding() is None and systematic:
        systematic = _systematic(yardstick, candidate_errors, precision)
        if systematic is not None:
            numbered = next(iter(starts.items()))
            evidence = _evidence(ratios, len(starts))
            return pair.fail(systematic, numbered, 1.0, evidence)
    return _judge(pair, starts, ratios, units)


def _judge(
    pair: _Pair, starts: Mapping[int, Update], ratios: _Ratios, units: float
) -> Verdict:
    """Returns the verdict on ratios of errors."""
    evidence = _evidence(ratios, len(starts))
    medians = ratios.medians
    position = f"the median of {len(starts)} single updates"
    failed = ratios.exceeding()
    if failed is None and not medians:
        summary = "no output, gradient or tensor of the state has numbers that could be rounded"
        return Verdict(Outcome.INCONCLUSIVE, CONTRACT, summary, evidence)
    if failed is None:
        largest = max(medians.values())
        summary = f"at most {largest:.2g} times the baseline's rounding in {position}"
        return Verdict(Outcome.PASS, CONTRACT, summary, evidence)
    if medians[failed] > ALLOWED:
        by_update = ratios.in_update[failed]
        times = medians[failed]
    else:
        by_update = ratios.to_largest[failed]
        times = ratios.maxima[failed]
        position = f"one of {len(starts)} single updates"
    pairs = zip(starts.items(), by_update, strict=False)
    numbered, _ = max(pairs, key=itemgetter(1))
    group = f"{group_name(failed)}, {position}"
    message = f"rounds {times:.2g} times as much as the baseline ({group})"
    return pair.fail(message, numbered, units, evidence)


def _evidence(ratios: _Ratios, states: int) -> dict[str, Any]:
    return {
        "states": states,
        "rounding": _by_name(ratios.medians),
        "largest": _by_name(ratios.maxima),
    }


def _by_name(ratios: Mapping[Location, float]) -> dict[str, Any]:
    return {group_name(group): json_number(ratio) for group, ratio in ratios.items()}


def group_name(group: Location) -> str:
    """Returns the name of a group of numbers that share a size."""
    if group.kind == "state":
        return f"'{group.name}' of the state"
    return (
        f"{group.kind}s{group.name}" if group.kind == "gradient" else f"{group.kind}s"
    )


def _foreign(errors: Sequence[Mapping[Location, float]], is_random: bool) -> str | None:
    """Returns the reason why the updates in float64 cannot serve as the truth; None if they can."""
    groups = dict.fromkeys(
        group for by_group in errors for group in by_group if group.kind != "state"
    )
    medians = [
        statistics.median(by_group.get(group, 0.0) for by_group in errors)
        for group in groups
    ]
    largest = max(medians, default=0.0)
    limit = FOREIGN_AND_RANDOM if is_random else FOREIGN
    if math.isfinite(largest) and largest <= limit:
        return None
    reason = "is not finite, or computes something else there"
    if is_random:
        hint = "draw them before and hand them in with the batch"
        reason = f"draws random numbers inside the step; {hint}"
    return (
        "the rounding cannot be compared: in float64 the baseline comes out otherwise by "
        f"{largest:.2g}; it {reason}"
    )


def _paired(
    baseline: Sequence[RoundingErrors], candidate: Sequence[RoundingErrors]
) -> dict[Location, list[_ErrorPair]]:
    """Returns the errors of each group in every update in which both have it."""
    errors: dict[Location, list[_ErrorPair]] = {}
    for expected, actual in zip(baseline, candidate, strict=True):
        for group, error in expected.by_group.items():
            if group not in actual.by_group:
                continue
            by_usual_size = actual.by_usual_size.get(group, math.inf)
            pair = _ErrorPair(error, actual.by_group[group], by_usual_size)
            errors.setdefault(group, []).append(pair)
    return errors


def _errors_in_other_format(
    baseline: Build,
    trajectory: Trajectory,
    truth: Sequence[Frame],
    types: Mapping[Location, torch.dtype],
) -> list[RoundingErrors]:
    """Returns the errors of the baseline with images in the other memory format; none
    if it has no images.

    Normalisations and convolutions have a kernel for each format, which do not add up with the same
    digits. What the baseline itself loses by the other kernel is rounding of a changed one, too.
    """
    isolation = trajectory.isolated(baseline)
    with OtherFormat() as mode:
        errors = rounding_errors(truth, trajectory.updated(isolation), types)
    return errors if mode.format is not None else []


def _larger(
    errors: Sequence[RoundingErrors], alternatives: Sequence[RoundingErrors]
) -> list[RoundingErrors]:
    """Returns the larger errors of two series of updates; the second may be empty."""
    if not alternatives:
        return list(errors)
    result = []
    for first, second in zip(errors, alternatives, strict=True):
        by_group = {
            group: max(error, second.by_group.get(group, 0.0))
            for group, error in first.by_group.items()
        }
        factors = {
            kind: max(factor, second.factors.get(kind, 0.0), key=abs)
            for kind, factor in first.factors.items()
        }
        result.append(first._replace(by_group=by_group, factors=factors))
    return result


def _systematic(
    baseline: Sequence[RoundingErrors],
    candidate: Sequence[RoundingErrors],
    precision: Precisions,
) -> str | None:
    """Returns a message if gradients or outputs have a common factor beyond rounding, in the median
    of all updates.

    The baseline's factors have no direction, so their median may be near zero by chance: the
    yardstick is their usual size.
    """
    for kind in candidate[0].factors:
        sizes = [abs(update.factors.get(kind, 0.0)) for update in baseline]
        factors = [update.factors.get(kind, 0.0) for update in candidate]
        factor = abs(statistics.median(factors))
        usual = statistics.median(sizes)
        if factor > ALLOWED * max(usual, FACTOR_ULPS * precision.of_kind(kind)):
            position = f"in the median of {len(candidate)} single updates"
            return f"all {kind}s are off by the factor {factor:.2g} {position}"
    return None


def _ratios(
    errors: Mapping[Location, Sequence[_ErrorPair]],
    precisions: Precisions,
    units: float,
) -> _Ratios:
    """Returns the ratios of the changed one's errors to the baseline's.

    That the baseline is lucky in one update is not held against the change. Where outputs are
    furthest off, they are measured by their usual size: one that passes zero there has none.
    """
    in_update: dict[Location, list[float]] = {}
    to_largest: dict[Location, list[float]] = {}
    for group, pairs in errors.items():
        precision = precisions.by_group[group]
        in_update[group] = [
            _ratio(group, pair.baseline, pair.candidate, precision, units)
            for pair in pairs
        ]
        largest = max(pair.baseline for pair in pairs)
        candidate_errors = [pair.candidate for pair in pairs]
        furthest = candidate_errors.index(max(candidate_errors))
        pair = pairs[furthest]
        candidate_errors[furthest] = min(pair.candidate, pair.by_usual_size)
        to_largest[group] = [
            _ratio(group, largest, error, precision, units)
            for error in candidate_errors
        ]
    return _Ratios(in_update, to_largest)


def _ratio(
    location: Location,
    baseline_error: float,
    error: float,
    precision: float,
    units: float,
) -> float:
    """Returns how many times larger an error is than the baseline's."""
    least = max(FEWEST_ULPS[location.kind], units) * precision
    return max(error, least) / max(baseline_error, least)


def _units_of_sums(baseline: Build, in_float64: Trajectory) -> float:
    """Returns the units by which a sum in the precision of its numbers may be off, in any order.

    The rounding of n terms grows as the root of n. Some kernels add up with more digits, others of
    the same operation do not (batch normalisation on a CPU, by the memory format): neither is
    wrong.
    """
    isolation = in_float64.isolated(baseline)
    with Sums() as sums:  # type: ignore[no-untyped-call]
        next(in_float64.updated(isolation))
    return min(math.sqrt(sums.terms), MOST_ULPS)
