"""Checks whether the gradients of single updates are the slopes of their outputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import as_float64
from runner.proof.isolation import Frame, Isolation, Location
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update

_SEEDS = 6  # of single updates whose gradients are compared with differences of their outputs
_SIGNS = 4  # directions in each of them, in addition to that of the gradient
_STEP = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a difference, as a share of all parameters
_SLOPE = {torch.float64: 1e-3, torch.float32: 0.05}  # by which a slope may be off, if the baseline's is exact
_LUCK = 10.0  # times as far off as the baseline's worst slope


class _Slopes(NamedTuple):
    """Changes of outputs of one update along some directions, of which the gradient is the
    first.
    """

    claimed: Tensor  # by the gradient
    measured: dict[Location, Tensor]  # by differences of each output
    spread: float  # the usual size of the claimed slope along a direction with random signs


def compare_slopes(baseline: Build, changed: Build, start: Update, seed: int, float64: bool) -> str | None:
    """Returns a message if the changed one's gradients are not the slopes of an output, although
    the baseline's are.
    """
    dtype = torch.float64 if float64 else torch.float32
    if not float64 and torch.get_default_dtype() != torch.float32:
        return None
    trajectory = Trajectory([start], seed, float64, as_trained=True)
    helper, isolation = (trajectory.isolated(baseline) for _ in range(2))
    reference = [_slopes(helper, isolation, trajectory, seed + number, dtype) for number in range(_SEEDS)]
    outputs = _objectives([each for each in reference if each is not None], _SLOPE[dtype])
    if not outputs:
        return None
    isolation = trajectory.isolated(changed)
    slopes = [_slopes(helper, isolation, trajectory, seed + number, dtype) for number in range(_SEEDS)]
    present = [each for each in slopes if each is not None]
    for output, (factor, along, across) in outputs.items():
        if not present or any(output not in each.measured for each in present):
            continue
        errors = [_slope_errors(each, output, factor) for each in present]
        for own, error in zip((along, across), map(statistics.median, zip(*errors, strict=True)), strict=True):
            if error > max(_SLOPE[dtype], _LUCK * own):
                return (
                    f"update 1, slot 'step': the gradients are not the slope of '{output}' ({error:.2g} of its size "
                    f"off, the baseline's {own:.2g}): the backward pass draws other numbers than the forward pass"
                )
    return None


def _slopes(
    helper: Isolation, isolation: Isolation, trajectory: Trajectory, seed: int, dtype: torch.dtype
) -> _Slopes | None:
    """Returns the slopes of one update, with these seeds in every repetition; None
    without a gradient.
    """
    (start,) = trajectory.updates

    def update(states: Mapping[str, Any] | None) -> Frame:
        (batch,) = trajectory.copies().values()
        isolation.load(states or {}, seed)
        return isolation.step(batch)

    frame = update(start.states)
    gradients = {each.name: as_float64(value) for each, value in frame.items() if each.kind == "gradient"}
    helper.load(start.states or {}, seed)
    gradients = {name: gradients[name] for name in helper.sizes().keys() & gradients.keys()}
    length = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
    if not math.isfinite(length) or not length:
        return None
    size = math.sqrt(sum(each**2 for each in helper.sizes().values()))
    distance = _STEP[dtype] * max(1.0, size)
    directions = [{name: each / length for name, each in gradients.items()}]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_SIGNS):
        signs = {
            name: torch.randint(0, 2, each.shape, generator=generator) * 2 - 1
            for name, each in sorted(directions[0].items())
        }
        directions.append({name: directions[0][name] * sign for name, sign in signs.items()})
    claimed = [
        sum(float((gradients[name] * each).sum()) for name, each in direction.items()) for direction in directions
    ]
    measured: dict[Location, list[float]] = {}
    for direction in directions:
        ends = [_totals(update(helper.moved(start.states or {}, direction, sign * distance))) for sign in (1.0, -1.0)]
        for output in ends[0].keys() & ends[1].keys():
            measured.setdefault(output, []).append((ends[0][output] - ends[1][output]) / (2 * distance))
    spread = math.sqrt(sum(float((each * gradients[name]).square().sum()) for name, each in directions[0].items()))
    whole = {output: torch.tensor(each) for output, each in measured.items() if len(each) == len(directions)}
    return _Slopes(torch.tensor(claimed), whole, spread)


def _totals(frame: Frame) -> dict[Location, float]:
    """The sum of every output that is a floating-point number, or a tensor of them."""
    return {
        location: float(as_float64(value).sum())
        for location, value in frame.items()
        if location.kind == "output" and is_real(value)
    }


def is_real(value: Any) -> bool:
    """Returns whether a value is a real floating-point number, or a tensor of them."""
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def _objectives(slopes: Sequence[_Slopes], tolerance: float) -> dict[Location, tuple[float | None, float, float]]:
    """Returns the outputs whose slope the gradients are, up to a factor, with the
    factor and the largest errors.

    The factor is None if it changes from update to update, as that of clipped gradients does.
    """
    found: dict[Location, tuple[float | None, float, float]] = {}
    for output in slopes[0].measured if slopes else ():
        if not all(output in each.measured for each in slopes):
            continue
        factors = [float(each.measured[output][0] / each.claimed[0]) for each in slopes]
        middle = statistics.median(factors)
        if not math.isfinite(middle) or not middle:
            continue
        steady = max(abs(each / middle - 1) for each in factors) < tolerance
        factor = middle if steady else None
        errors = [_slope_errors(each, output, factor) for each in slopes]
        along, across = (max(each) for each in zip(*errors, strict=True))
        if across < tolerance:
            found[output] = (factor, along, across)
    return found


def _slope_errors(slopes: _Slopes, output: Location, factor: float | None) -> tuple[float, float]:
    """Returns the errors of slopes in the direction of the gradient, and in the median
    of the others.
    """
    measured, claimed = slopes.measured[output], slopes.claimed
    scale = factor or float(measured[0] / claimed[0]) or math.inf
    along = abs(float(measured[0] / (scale * claimed[0])) - 1)
    across = float(((measured - scale * claimed)[1:].abs() / (abs(scale) * slopes.spread)).median())
    return along, across
