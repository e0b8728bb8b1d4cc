"""Random numbers of compiled code, which in a training differ from those of eager code."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import (
    LOADED_TOLERANCE,
    compared_values,
    describe_first,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.isolation import Frame, Isolation, Location, StepError
from runner.proof.slopes import compare_slopes, is_real
from runner.proof.subject import Build
from runner.proof.subject_states import saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import on_host
from runner.proof.verdict import Outcome, Verdict
from runner.system.tensor_trees import as_float64

AS_TRAINED = "with the random numbers that it trains with, "
"""Beginning of a message about a difference."""
SECONDS = 20.0
"""Time for sampled updates."""
# Updates before the one that is compared, so that nothing is zero any more.
_FIRST = 2
# Number of updates whose outputs and gradients are compared by their statistics.
_FEWEST = 128
_MOST = 256
# Elements of a tensor whose means are compared; rows along each dimension whose elements are
# compared in pairs, and the length of these rows.
_ELEMENTS = 512
_FIBRES = 4
_LENGTH = 48
# Number of tensors that are compared, the largest ones.
_TENSORS = 24
# Standard errors in a first sample, and in another one that confirms it.
_SURE = 6.0
_CONFIRMED = 5.0
# Standard deviations beyond which an element has no more weight.
_CLIP = 8.0


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

    * every gradient has to be the slope of the output that it belongs to: that of a dropout whose
      backward pass draws another mask is not;
    * means, variances and the dependence of elements on each other and on the update before have to
      be those of the baseline: a wrong keep rate, a mask that is repeated along a dimension, and
      one that comes again differ there.

    Args:
        baseline: Makes the baseline.
        changed: Makes the same with the change.
        batches: One for each update.
        contract: The name of the contract for the verdict.
        seed: Of the global random generators.
        seconds: Time for sampled updates.
        compiled_before: Number of graphs that the process had compiled before it compared both.

    Raises:
        StepError: The baseline itself fails.
    """
    passed = Verdict(
        Outcome.PASS, contract, "the same with the random numbers of a training"
    )
    float64 = contract == "Close"
    start, draws = _begin(baseline, batches, seed)
    # To compile again takes long, and without random numbers there is nothing to compare.
    if not draws and compiled_graphs() > compiled_before:
        return passed
    with _as_in_a_training():
        try:
            difference = _first_difference(baseline, changed, start, seed, float64)
            if difference is None:
                return passed
            if not draws or not float64:
                return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{difference}")
            for is_precise in (True, False):
                message = compare_slopes(baseline, changed, start, seed, is_precise)
                if message:
                    return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{message}")
            count, message = _compare_samples(baseline, changed, start, seed, seconds)
        except StepError as error:
            verdict = error.verdict(contract, baseline)
            summary = f"{AS_TRAINED}{verdict.summary}"
            return Verdict(verdict.outcome, contract, summary)
    evidence = {"random_updates": count}
    if message:
        return Verdict(Outcome.FAIL, contract, f"{AS_TRAINED}{message}", evidence)
    summary = (
        f"its random numbers have the same effect as the baseline's in {count} updates"
    )
    return Verdict(Outcome.PASS, contract, summary, evidence)


def compiled_graphs() -> int:
    """Returns the number of graphs that torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    return int(dynamo.counters["stats"]["unique_graphs"])


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
    """Returns an update from a state of the baseline's trajectory, and whether the baseline
    draws random numbers in an update.
    """
    trajectory = Trajectory([*batches[:_FIRST]], seed)
    isolation = trajectory.isolated(baseline)
    draws = False
    for _ in trajectory.updated(isolation):
        draws = draws or isolation.drew
    batch = batches[min(_FIRST, len(batches) - 1)]
    state = on_host(saved(isolation.subject))
    return Update(batch, state, seed + _FIRST), draws


def _first_difference(
    baseline: Build, changed: Build, start: Update, seed: int, float64: bool
) -> str | None:
    """Returns the first difference between two updates, in float64 if only the algebra was
    promised.
    """
    trajectory = Trajectory([start], seed, float64, as_trained=True)
    reference = trajectory.isolated(baseline)
    candidate = trajectory.isolated(changed)
    expected = next(trajectory.updated(reference))
    actual = next(trajectory.updated(candidate))
    names = shared(reference.subject.state, candidate.subject.state)
    compared = compared_values(expected, actual, names)
    if float64:
        locations = differing(compared, actual, LOADED_TOLERANCE)
    else:
        locations = not_same_bits(compared, actual)
    difference = describe_first(1, compared, actual, locations)
    return None if difference is None else str(difference)


class _Probe(NamedTuple):
    """The elements of a tensor that are compared.

    Attributes:
        elements: Their numbers.
        rows: By dimension, the numbers of elements that differ in this dimension alone, row by row.
    """

    elements: Tensor
    rows: dict[int, Tensor]


def _compare_samples(
    baseline: Build, changed: Build, start: Update, seed: int, seconds: float
) -> tuple[int, str | None]:
    """Returns the number of sampled updates of each, and the statistic in which they differ."""
    trajectory = Trajectory([start], seed, as_trained=True)
    isolations = trajectory.isolated(baseline), trajectory.isolated(changed)
    for isolation in isolations:
        isolation.load(start.states or {}, seed)
    probes: dict[Location, _Probe] = {}
    started = time.monotonic()
    _sample(isolations, trajectory, probes, 2)
    duration = (time.monotonic() - started) / 2
    count = int(min(_MOST, max(_FEWEST, seconds / 3 / max(duration, 1e-6))))
    first = _sample(isolations, trajectory, probes, count)
    second = _sample(isolations, trajectory, probes, count)
    suspects = _suspicious(first, second, probes, _SURE)
    if suspects:
        # A random difference does not come again in a third sample.
        third = _sample(isolations, trajectory, probes, count)
        confirmed = _suspicious(first, third, probes, _CONFIRMED)
        suspects = {key: errors for key, errors in suspects.items() if key in confirmed}
    if not suspects:
        return 2 * count, None
    (location, statistic), errors = max(suspects.items(), key=lambda pair: pair[1])
    sample = f"in {count} updates with the same state and batch"
    message = f"'{location}' {statistic} {sample} ({errors:.1f} standard errors)"
    return 2 * count, message


_Sample = tuple[dict[Location, Tensor], dict[Location, Tensor]]
"""Elements of outputs and gradients of the baseline and of the changed one, an update a row."""


def _sample(
    isolations: Sequence[Isolation],
    trajectory: Trajectory,
    probes: dict[Location, _Probe],
    count: int,
) -> _Sample:
    """Makes updates from the same state with the same batch, one by one without new seeds."""
    (start,) = trajectory.updates
    samples: list[dict[Location, list[Tensor]]] = [{}, {}]
    for _ in range(count):
        for isolation, rows in zip(isolations, samples, strict=True):
            isolation.load(start.states or {})
            (batch,) = trajectory.copies().values()
            frame = isolation.step(batch)
            if not probes:
                probes.update(_probes(frame))
            for location, probe in probes.items():
                row = _probed(frame, location, probe)
                if row is not None:
                    rows.setdefault(location, []).append(row)
    baseline, changed = (_stack_complete(rows, count) for rows in samples)
    return baseline, changed


def _probed(frame: Frame, location: Location, probe: _Probe) -> Tensor | None:
    """Returns the elements of a tensor; None if it is missing or too small."""
    if location not in frame:
        return None
    value = as_float64(frame[location]).flatten()
    rows = [numbers.flatten() for numbers in probe.rows.values()]
    numbers = torch.cat([probe.elements, *rows])
    return value[numbers] if len(value) > int(numbers.max()) else None


def _stack_complete(
    rows: Mapping[Location, Sequence[Tensor]], count: int
) -> dict[Location, Tensor]:
    """Returns the elements that were observed in every update."""
    return {
        location: torch.stack([*values])
        for location, values in rows.items()
        if len(values) == count
    }


def _probes(frame: Frame) -> dict[Location, _Probe]:
    sizes = {
        location: as_float64(value).numel()
        for location, value in frame.items()
        if location.kind != "state" and is_real(value)
    }
    present = [location for location, size in sizes.items() if size]
    largest = sorted(present, key=lambda location: -sizes[location])[:_TENSORS]
    return {location: _probe(as_float64(frame[location])) for location in largest}


def _probe(tensor: Tensor) -> _Probe:
    generator = torch.Generator().manual_seed(tensor.numel())
    numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
    elements = torch.randperm(tensor.numel(), generator=generator)[:_ELEMENTS]
    rows: dict[int, Tensor] = {}
    for dimension, length in enumerate(tensor.shape):
        if length < 2:
            continue
        # Neighbours, and elements at half the length, where a mask that is too short would repeat.
        columns = [*range(length)]
        if length > 2 * _LENGTH:
            middle = length // 2
            columns = [*range(_LENGTH), *range(middle, middle + _LENGTH)]
        fibres = numbers.movedim(dimension, -1).reshape(-1, length)
        picks = torch.randperm(len(fibres), generator=generator)[:_FIBRES]
        rows[dimension] = fibres[picks][:, columns]
    return _Probe(elements, rows)


class _Samples(NamedTuple):
    """Two samples of both, of one tensor; the second one tests what the first one shows."""

    baseline: Tensor
    candidate: Tensor
    second_baseline: Tensor
    second_candidate: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> _Samples:
        """Returns samples with a function applied to each."""
        return _Samples(*(change(sample) for sample in self))


def _suspicious(
    first: _Sample,
    second: _Sample,
    probes: Mapping[Location, _Probe],
    limit: float,
) -> dict[tuple[Location, str], float]:
    """Returns the statistics in which the second sample differs as the first one does, with
    the standard errors.
    """
    suspects: dict[tuple[Location, str], float] = {}
    for location, probe in probes.items():
        if any(location not in values for values in (*first, *second)):
            continue
        samples = _Samples(*(values[location] for values in (*first, *second)))
        for name, errors in _contrasts(samples, probe).items():
            if errors > limit:
                suspects[location, name] = errors
    return suspects


def _contrasts(samples: _Samples, probe: _Probe) -> dict[str, float]:
    """Returns by how many standard errors each statistic of a tensor differs."""
    middle = samples.baseline.mean(0)
    deviation = samples.baseline.std(0)
    largest = samples.baseline.abs().max().clamp(min=1e-30)
    scale = deviation.clamp(min=1e-6 * largest)
    samples = samples.map(
        lambda sample: ((sample - middle) / scale).clamp(-_CLIP, _CLIP)
    )
    count = len(probe.elements)
    elements = samples.map(lambda sample: sample[:, :count])
    contrasts = {
        "differs in its mean": _contrast(elements),
        "varies otherwise": _contrast(elements.map(torch.square)),
        "depends on the update before": _welch(
            _consecutive(elements.second_baseline),
            _consecutive(elements.second_candidate),
        ),
    }
    first = count
    for dimension, rows in probe.rows.items():
        columns = slice(first, first + rows.numel())
        pairs = samples.map(partial(_rows, columns, rows.shape))
        name = f"has elements along dimension {dimension} that depend on each other"
        contrasts[name] = _pairs_contrast(pairs)
        first = columns.stop
    return contrasts


def _rows(columns: slice, shape: torch.Size, sample: Tensor) -> Tensor:
    return sample[:, columns].reshape(-1, *shape)


def _consecutive(sample: Tensor) -> Tensor:
    """Returns the similarity of consecutive updates."""
    return (sample[1:] * sample[:-1]).mean(1)


def _contrast(samples: _Samples) -> float:
    """Returns whether the means differ in the second pair as they do in the first: the standard
    errors between them.
    """
    weights = samples.candidate.mean(0) - samples.baseline.mean(0)
    return _welch(samples.second_baseline @ weights, samples.second_candidate @ weights)


def _pairs_contrast(samples: _Samples) -> float:
    """Returns the contrast of the products of all pairs of elements in a row; samples are updates,
    rows and elements.
    """
    weights = _mean_products(samples.candidate) - _mean_products(samples.baseline)
    weights.diagonal(dim1=-2, dim2=-1).zero_()
    return _welch(
        _weighted_products(samples.second_baseline, weights),
        _weighted_products(samples.second_candidate, weights),
    )


def _mean_products(sample: Tensor) -> Tensor:
    return torch.einsum("nri,nrj->rij", sample, sample) / len(sample)


def _weighted_products(sample: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("nri,rij,nrj->n", sample, weights, sample)


def _welch(first: Tensor, second: Tensor) -> float:
    """Returns by how many standard errors the second mean is above the first."""
    first_variance = float(first.var()) / len(first)
    second_variance = float(second.var()) / len(second)
    error = math.sqrt(first_variance + second_variance)
    difference = float(second.mean() - first.mean())
    if not error:
        return math.inf if difference > 1e-9 else 0.0
    return difference / error
