"""Random numbers as a changed step trains with them: compiled code draws others than eager code."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import (
    LOADED_TOLERANCE,
    MISSING,
    as_float64,
    comparable,
    described,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.slopes import compare_slopes, is_real
from runner.proof.subject import Build
from runner.proof.subject_states import on_host, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict

AS_TRAINED = "with the random numbers that it trains with, "
_FIRST = 2  # updates before the one that is looked at, so that nothing is zero any more
_FEWEST, _MOST = 128, 256  # updates whose outputs and gradients are compared by their statistics
SECONDS = 20.0  # that they may take
_ELEMENTS, _FIBRES, _LENGTH = 512, 4, 48  # of a tensor that are looked at: alone, and in rows along each dimension
_TENSORS = 24  # that are looked at, the largest ones
_SURE, _CONFIRMED = 6.0, 5.0  # standard errors, in a first sample and in another one
_CLIP = 8.0  # standard deviations, beyond which an element counts no more


def same_randomness(
    baseline: Build,
    changed: Build,
    batches: Sequence[Any],
    contract: str,
    seed: int,
    seconds: float = SECONDS,
    compiled_before: int = 0,
) -> Verdict:
    """Compares both with the random numbers that compiled code draws in a training.

    Everywhere else compiled code uses the random numbers of eager code, so that results can be
    compared. Here it does not. If the results are nevertheless the same, the check is finished. If
    not, and the baseline uses random numbers as well, then

    * every gradient has to be the slope of the output that it belongs to: that of a dropout whose backward pass draws
      another mask is not;
    * means, variances and the dependence of elements on each other and on the update before have to be those of the
      baseline: a wrong keep rate, a mask that is repeated along a dimension, and one that comes again differ there.

    Args:
        baseline: Makes what to compare with.
        changed: Makes the same with the change.
        batches: One for each update.
        contract: The name of the contract for the verdict.
        seed: Of the global random generators.
        seconds: How long updates may be sampled.
        compiled_before: How many graphs the process had compiled before it compared these two.

    Raises:
        StepError: The baseline itself fails.
    """
    passed = Verdict(Outcome.PASS, contract, "the same with the random numbers of a training")
    float64 = contract == "Close"
    start, drew = _begin(baseline, batches, seed)
    if not drew and compiled_graphs() > compiled_before:  # to compile again takes long, and there is nothing to draw
        return passed
    with _as_in_a_training():
        try:
            found = _first_difference(baseline, changed, start, seed, float64)
            if found is None:
                return passed
            if not drew or not float64:
                return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{found}")
            for precise in (True, False):
                if wrong := compare_slopes(baseline, changed, start, seed, precise):
                    return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{wrong}")
            updates, wrong = _compare_samples(baseline, changed, start, seed, seconds)
        except StepError as error:
            verdict = error.verdict(contract, baseline)
            return Verdict(verdict.outcome, contract, f"{AS_TRAINED}{verdict.summary}")
    if wrong:
        return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{wrong}", {"random_updates": updates})
    summary = f"its random numbers have the same effect as the baseline's in {updates} updates"
    return Verdict(Outcome.PASS, contract, summary, {"random_updates": updates})


def compiled_graphs() -> int:
    """Returns the number of graphs that torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


@contextmanager
def _as_in_a_training() -> Iterator[None]:
    """Forgets compiled code before and after, which draws as it did when it was compiled."""
    _forget_compiled_code()
    try:
        yield
    finally:
        _forget_compiled_code()


def _forget_compiled_code() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _begin(baseline: Build, batches: Sequence[Any], seed: int) -> tuple[Update, bool]:
    """An update from a state on the baseline's way, and whether the baseline draws random numbers in an update."""
    trajectory = Trajectory([*batches[:_FIRST]], seed)
    isolation = trajectory.isolated(baseline)
    drew = False
    for _ in trajectory.updated(isolation):
        drew = drew or isolation.drew
    return Update(batches[min(_FIRST, len(batches) - 1)], on_host(saved(isolation.subject)), seed + _FIRST), drew


def _first_difference(baseline: Build, changed: Build, start: Update, seed: int, float64: bool) -> str | None:
    """The first difference between two updates, in float64 if only the algebra was promised."""
    trajectory = Trajectory([start], seed, float64, as_trained=True)
    isolations = [trajectory.isolated(build) for build in (baseline, changed)]
    frame, other = (next(trajectory.updated(isolation)) for isolation in isolations)
    names = shared(*(isolation.subject.state for isolation in isolations))
    values = {location: frame[location] for location in comparable(frame, other, names)}
    locations = differing(values, other, LOADED_TOLERANCE) if float64 else not_same_bits(values, other)
    location = next(locations, None)
    return location and str(described(1, location, frame[location], other.get(location, MISSING)))


class _Probe(NamedTuple):
    """The elements of a tensor that are looked at."""

    alone: Tensor  # their numbers
    rows: dict[int, Tensor]  # by dimension: numbers of elements that differ in this dimension alone, row by row


def _compare_samples(
    baseline: Build, changed: Build, start: Update, seed: int, seconds: float
) -> tuple[int, str | None]:
    """Returns the number of sampled updates of each, and the statistic in which they differ."""
    trajectory = Trajectory([start], seed, as_trained=True)
    isolations = trajectory.isolated(baseline), trajectory.isolated(changed)
    for isolation in isolations:
        isolation.load(start.states or {}, seed)
    probes: dict[Location, _Probe] = {}
    began = time.monotonic()
    _sample(isolations, trajectory, probes, 2)
    each = (time.monotonic() - began) / 2
    count = int(min(_MOST, max(_FEWEST, seconds / 3 / max(each, 1e-6))))
    learnt = _sample(isolations, trajectory, probes, count)
    tested = _sample(isolations, trajectory, probes, count)
    suspects = _suspicious(learnt, tested, probes, _SURE)
    if suspects:  # possibly by chance, which is not repeated
        again = _suspicious(learnt, _sample(isolations, trajectory, probes, count), probes, _CONFIRMED)
        suspects = {what: errors for what, errors in suspects.items() if what in again}
    if not suspects:
        return 2 * count, None
    (location, statistic), errors = max(suspects.items(), key=lambda pair: pair[1])
    return 2 * count, (
        f"'{location}' {statistic} in {count} updates with the same state and batch ({errors:.1f} standard errors)"
    )


_Sample = tuple[dict[Location, Tensor], dict[Location, Tensor]]
"""Elements of outputs and gradients of the baseline and of the changed one, an update a row."""


def _sample(
    isolations: Sequence[Isolation], trajectory: Trajectory, probes: dict[Location, _Probe], count: int
) -> _Sample:
    """Makes updates from the same state with the same batch, one after the other without new seeds."""
    (start,) = trajectory.updates
    found: list[dict[Location, list[Tensor]]] = [{}, {}]
    for _ in range(count):
        for isolation, rows in zip(isolations, found, strict=True):
            isolation.load(start.states or {})
            (batch,) = trajectory.copies().values()
            frame = isolation.step(batch)
            if not probes:
                probes.update(_probes(frame))
            for location, probe in probes.items():
                value = as_float64(frame[location]).flatten() if location in frame else torch.empty(0)
                numbers = torch.cat([probe.alone, *(each.flatten() for each in probe.rows.values())])
                if len(value) > int(numbers.max()):
                    rows.setdefault(location, []).append(value[numbers])
    baseline, changed = (
        {location: torch.stack(each) for location, each in rows.items() if len(each) == count} for rows in found
    )
    return baseline, changed


def _probes(frame: Frame) -> dict[Location, _Probe]:
    sizes = {
        location: as_float64(value).numel()
        for location, value in frame.items()
        if location.kind != "state" and is_real(value)
    }
    largest = sorted((each for each in sizes if sizes[each]), key=lambda each: -sizes[each])[:_TENSORS]
    return {location: _probe(as_float64(frame[location])) for location in largest}


def _probe(tensor: Tensor) -> _Probe:
    generator = torch.Generator().manual_seed(tensor.numel())
    numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
    alone = torch.randperm(tensor.numel(), generator=generator)[:_ELEMENTS]
    rows: dict[int, Tensor] = {}
    for dimension, length in enumerate(tensor.shape):
        if length < 2:
            continue
        # Neighbours, and elements at half the length, where a mask that is too short would repeat.
        columns = [*range(length)]
        if length > 2 * _LENGTH:
            columns = [*range(_LENGTH), *range(length // 2, length // 2 + _LENGTH)]
        fibres = numbers.movedim(dimension, -1).reshape(-1, length)
        picks = torch.randperm(len(fibres), generator=generator)[:_FIBRES]
        rows[dimension] = fibres[picks][:, columns]
    return _Probe(alone, rows)


def _suspicious(
    learnt: _Sample, tested: _Sample, probes: Mapping[Location, _Probe], errors: float
) -> dict[tuple[Location, str], float]:
    """The statistics in which the second sample differs as the first one does, with the standard errors."""
    found: dict[tuple[Location, str], float] = {}
    for location, probe in probes.items():
        samples = (*learnt, *tested)
        if any(location not in each for each in samples):
            continue
        middle, deviation = learnt[0][location].mean(0), learnt[0][location].std(0)
        smallest = 1e-6 * learnt[0][location].abs().max().clamp(min=1e-30)
        first, other, second, candidate = (
            ((each[location] - middle) / deviation.clamp(min=smallest)).clamp(-_CLIP, _CLIP) for each in samples
        )
        count = len(probe.alone)
        contrasts = {
            "differs in its mean": _contrast(*(each[:, :count] for each in (first, other, second, candidate))),
            "varies otherwise": _contrast(*(each[:, :count].square() for each in (first, other, second, candidate))),
            "depends on the update before": _welch(*(_consecutive(each[:, :count]) for each in (second, candidate))),
        }
        for dimension, rows in probe.rows.items():
            end = count + rows.numel()
            parts = [each[:, count:end].reshape(-1, *rows.shape) for each in (first, other, second, candidate)]
            name = f"has elements along dimension {dimension} that depend on each other"
            contrasts[name] = _pairs_contrast(*parts)
            count = end
        found |= {(location, name): value for name, value in contrasts.items() if value > errors}
    return found


def _consecutive(sample: Tensor) -> Tensor:
    """Returns the similarity of consecutive updates."""
    return (sample[1:] * sample[:-1]).mean(1)


def _contrast(first: Tensor, other: Tensor, second: Tensor, candidate: Tensor) -> float:
    """Returns whether the means differ in the second pair as they do in the first: the standard
    errors between them.
    """
    weights = other.mean(0) - first.mean(0)
    return _welch(second @ weights, candidate @ weights)


def _pairs_contrast(first: Tensor, other: Tensor, second: Tensor, candidate: Tensor) -> float:
    """Returns the contrast of the products of all pairs of elements in a row; samples are updates,
    rows and elements.
    """
    products = [torch.einsum("nri,nrj->rij", each, each) / len(each) for each in (first, other)]
    weights = products[1] - products[0]
    weights.diagonal(dim1=-2, dim2=-1).zero_()
    return _welch(*(torch.einsum("nri,rij,nrj->n", each, weights, each) for each in (second, candidate)))


def _welch(one: Tensor, other: Tensor) -> float:
    """Returns by how many standard errors the second mean is above the first."""
    error = math.sqrt(float(one.var()) / len(one) + float(other.var()) / len(other))
    difference = float(other.mean() - one.mean())
    if not error:
        return math.inf if difference > 1e-9 else 0.0
    return difference / error
