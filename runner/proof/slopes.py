"""Checks whether the gradients of single updates are the slopes of their outputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.proof.isolation import Frame, Isolation, Location
from runner.proof.subject import Build
from runner.proof.trajectory import Trajectory, Update
from runner.system.tensor_trees import as_float64

# Number of single updates whose gradients are compared with differences of their outputs.
_SEEDS = 6
# Directions in each of them, in addition to that of the gradient.
_SIGNS = 4
# Length of a difference, as a share of all parameters.
_STEP = {torch.float64: 1e-6, torch.float32: 1e-3}
# Relative error that a slope may have if the baseline's slope is exact.
_SLOPE = {torch.float64: 1e-3, torch.float32: 0.05}
# Times as far off as the baseline's worst slope that a slope may be.
_LUCK = 10.0

Direction = dict[str, Tensor]
"""A direction in the space of the parameters, by their names."""


class _Slopes(NamedTuple):
    """Changes of outputs of one update along some directions; the first one is that of the
    gradient.

    Attributes:
        claimed: The slopes by the gradient.
        measured: The slopes by differences of each output.
        spread: The usual size of the claimed slope along a direction with random signs.
    """

    claimed: Tensor
    measured: dict[Location, Tensor]
    spread: float


class _Objective(NamedTuple):
    """An output whose slope the gradients of the baseline are.

    Attributes:
        factor: Of the slope; None if it changes from update to update, as that of clipped
            gradients does.
        along: Largest error of a slope in the direction of the gradient.
        across: Largest error in the median of the other directions.
    """

    factor: float | None
    along: float
    across: float


def compare_slopes(
    baseline: Build, changed: Build, start: Update, seed: int, float64: bool
) -> str | None:
    """Returns a message if the changed one's gradients are not the slopes of an output, although
    the baseline's are.
    """
    dtype = torch.float64 if float64 else torch.float32
    # The length of a difference is chosen for these two types.
    if not float64 and torch.get_default_dtype() != torch.float32:
        return None
    trajectory = Trajectory([start], seed, float64, as_trained=True)
    helper = trajectory.isolated(baseline)
    isolation = trajectory.isolated(baseline)
    reference = _all_slopes(_Measurement(helper, isolation, trajectory, dtype), seed)
    objectives = _objectives(reference, _SLOPE[dtype])
    if not objectives:
        return None
    isolation = trajectory.isolated(changed)
    slopes = _all_slopes(_Measurement(helper, isolation, trajectory, dtype), seed)
    for output, objective in objectives.items():
        if not slopes or any(output not in update.measured for update in slopes):
            continue
        errors = [_slope_errors(update, output, objective.factor) for update in slopes]
        medians = [statistics.median(values) for values in zip(*errors, strict=True)]
        allowed = (objective.along, objective.across)
        for expected, error in zip(allowed, medians, strict=True):
            if error > max(_SLOPE[dtype], _LUCK * expected):
                size = f"{error:.2g} of its size off, the baseline's {expected:.2g}"
                return (
                    f"update 1, slot 'step': the gradients are not the slope of '{output}' "
                    f"({size}): the backward pass draws other numbers than the forward pass"
                )
    return None


def _all_slopes(measurement: _Measurement, seed: int) -> list[_Slopes]:
    """Returns the slopes of updates with different seeds, without those that have no gradient."""
    slopes = [measurement.slopes(seed + number) for number in range(_SEEDS)]
    return [update for update in slopes if update is not None]


@dataclass(frozen=True)
class _Measurement:
    """Measures the slopes of single updates.

    Attributes:
        helper: A baseline that moves the parameters.
        isolation: The subject.
        trajectory: The update with the state before it.
        dtype: The precision.
    """

    helper: Isolation
    isolation: Isolation
    trajectory: Trajectory
    dtype: torch.dtype

    @property
    def _states(self) -> Mapping[str, Any]:
        return self.trajectory.updates[0].states or {}

    def slopes(self, seed: int) -> _Slopes | None:
        """Returns the slopes of one update, with this seed in every repetition; None
        without a gradient.
        """
        gradients = self._gradients(seed)
        squares = [float(gradient.square().sum()) for gradient in gradients.values()]
        length = math.sqrt(sum(squares))
        if not math.isfinite(length) or not length:
            return None
        size = math.sqrt(sum(norm**2 for norm in self.helper.sizes().values()))
        distance = _STEP[self.dtype] * max(1.0, size)
        directions = _directions(gradients, length, seed)
        claimed = [_product(gradients, direction) for direction in directions]
        measured = self._measure(directions, distance, seed)
        spread = sum(
            float((value * gradients[name]).square().sum())
            for name, value in directions[0].items()
        )
        return _Slopes(torch.tensor(claimed), measured, math.sqrt(spread))

    def _gradients(self, seed: int) -> Direction:
        """Returns the gradients of the parameters that the baseline has, too."""
        frame = self._update(self._states, seed)
        gradients = {
            location.name: as_float64(value)
            for location, value in frame.items()
            if location.kind == "gradient"
        }
        self.helper.load(self._states, seed)
        # The helper cannot move parameters that only the changed one has.
        names = self.helper.sizes().keys() & gradients.keys()
        return {name: gradients[name] for name in names}

    def _measure(
        self, directions: Sequence[Direction], distance: float, seed: int
    ) -> dict[Location, Tensor]:
        """Returns the differences of the outputs that are numbers along all directions."""
        measured: dict[Location, list[float]] = {}
        for direction in directions:
            # The error of central differences is of second order in the distance.
            upper = self._totals_at(direction, distance, seed)
            lower = self._totals_at(direction, -distance, seed)
            for output in upper.keys() & lower.keys():
                slope = (upper[output] - lower[output]) / (2 * distance)
                measured.setdefault(output, []).append(slope)
        return {
            output: torch.tensor(slopes)
            for output, slopes in measured.items()
            if len(slopes) == len(directions)
        }

    def _totals_at(
        self, direction: Direction, distance: float, seed: int
    ) -> dict[Location, float]:
        states = self.helper.moved(self._states, direction, distance)
        return _totals(self._update(states, seed))

    def _update(self, states: Mapping[str, Any], seed: int) -> Frame:
        (batch,) = self.trajectory.copies().values()
        self.isolation.load(states, seed)
        return self.isolation.step(batch)


def _directions(gradients: Direction, length: float, seed: int) -> list[Direction]:
    """Returns the direction of the gradient, and directions with random signs of its elements."""
    first = {name: gradient / length for name, gradient in gradients.items()}
    directions = [first]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_SIGNS):
        signs = {
            name: torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            for name, value in sorted(first.items())
        }
        directions.append({name: first[name] * sign for name, sign in signs.items()})
    return directions


def _product(gradients: Direction, direction: Direction) -> float:
    return sum(
        float((gradients[name] * value).sum()) for name, value in direction.items()
    )


def _totals(frame: Frame) -> dict[Location, float]:
    """Returns the sum of every output that is a floating-point number, or a tensor of them."""
    return {
        location: float(as_float64(value).sum())
        for location, value in frame.items()
        if location.kind == "output" and is_real(value)
    }


def is_real(value: Any) -> bool:
    """Returns whether a value is a real floating-point number, or a tensor of them."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, float)


def _objectives(
    slopes: Sequence[_Slopes], tolerance: float
) -> dict[Location, _Objective]:
    """Returns the outputs whose slope the gradients are, up to a factor."""
    objectives: dict[Location, _Objective] = {}
    for output in slopes[0].measured if slopes else ():
        if not all(output in update.measured for update in slopes):
            continue
        factors = [
            float(update.measured[output][0] / update.claimed[0]) for update in slopes
        ]
        middle = statistics.median(factors)
        if not math.isfinite(middle) or not middle:
            continue
        is_steady = max(abs(factor / middle - 1) for factor in factors) < tolerance
        factor = middle if is_steady else None
        errors = [_slope_errors(update, output, factor) for update in slopes]
        along, across = (max(values) for values in zip(*errors, strict=True))
        if across < tolerance:
            objectives[output] = _Objective(factor, along, across)
    return objectives


def _slope_errors(
    slopes: _Slopes, output: Location, factor: float | None
) -> tuple[float, float]:
    """Returns the errors of slopes in the direction of the gradient, and in the median
    of the others.
    """
    measured = slopes.measured[output]
    claimed = slopes.claimed
    scale = factor or float(measured[0] / claimed[0]) or math.inf
    along = abs(float(measured[0] / (scale * claimed[0])) - 1)
    errors = (measured - scale * claimed)[1:].abs() / (abs(scale) * slopes.spread)
    return along, float(errors.median())
