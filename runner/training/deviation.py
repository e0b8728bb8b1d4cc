"""Decides whether an update as trained deviates from the baseline's update.

Deviations that the contract of the stages allows do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.plugin.contract import Contract, Exact, Statistical
from runner.proof.difference import digest

# Three perturbations estimate how far rounding moves an element. Less than one estimate in ten
# million is too small by this factor.
TIMES = 200.0
# Rounding that is always allowed, in ulps of the largest number of a tensor.
LEAST_ULPS = 64.0
# A maximum or a threshold that switches moves this share of a tensor's elements further.
FEW = 1e-3
# A single element counts beyond this multiple of the allowed distance, if it deviates twice.
FAR = 100.0
# No rounding explains a deviation of this share of the tensor's largest number.
GROSS = 0.1


_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class Deviation:
    """A tensor that deviates.

    Attributes:
        name: Its dotted path in the state, or in the result of the update.
        size: The largest difference of two elements.
        elements: How many elements deviate by more than rounding explains.
        is_gross: Whether no rounding explains it, so that one update is enough.
        alone: The element that deviates most, if only few do.
    """

    name: str
    size: float
    elements: int
    is_gross: bool
    alone: int | None = None

    def repeats(self, earlier: Iterable[Deviation]) -> bool:
        """Returns whether the same tensor deviated before; if few elements do, the same element."""
        subjects = {(deviation.name, deviation.alone) for deviation in earlier}
        return (self.name, self.alone) in subjects

    def __str__(self) -> str:
        noun = "element" if self.elements == 1 else "elements"
        return f"'{self.name}' differs by {self.size:.3g} in {self.elements:,} {noun}"


def find_deviations(
    trained: Mapping[str, Any],
    baseline: Mapping[str, Any],
    yardsticks: Iterable[Mapping[str, Any]],
    contract: Contract,
) -> list[Deviation]:
    """Returns the tensors of an update that deviate, those with the most elements first.

    Args:
        trained: Result and state of the update as it was trained.
        baseline: The same of the baseline, from the same state.
        yardsticks: The same of the perturbed baseline, for ``Close``; evaluated only if a tensor
            differs.
        contract: The contract of the stages together. A ``Statistical`` stage may compute something
            else in an update, so only shapes, types and finite numbers are compared.
    """
    if isinstance(contract, Exact):
        return _different_bits(trained, baseline)
    if isinstance(contract, Statistical):
        return _different_forms(trained, baseline)
    differing = {
        name: value
        for name, value in baseline.items()
        if digest(value) != digest(trained.get(name))
    }
    if not differing:
        return []

    spreads: dict[str, Tensor] = {}
    for perturbed in yardsticks:
        for name, expected in differing.items():
            distance = _distance(expected, perturbed.get(name))
            if name in spreads:
                distance = torch.maximum(spreads[name], distance)
            spreads[name] = distance

    deviations = []
    for name, expected in differing.items():
        deviation = _deviation(name, expected, trained.get(name), spreads.get(name))
        if deviation is not None:
            deviations.append(deviation)
    return sorted(
        deviations,
        key=lambda deviation: (deviation.is_gross, deviation.elements),
        reverse=True,
    )


def _different_bits(
    trained: Mapping[str, Any], baseline: Mapping[str, Any]
) -> list[Deviation]:
    deviations = []
    for name, expected in baseline.items():
        value = trained.get(name)
        if digest(value) != digest(expected):
            distance = _distance(expected, value)
            largest = float(distance.max())
            count = int((distance != 0).sum())
            deviations.append(Deviation(name, largest, count, is_gross=True))
    return deviations


def _different_forms(
    trained: Mapping[str, Any], baseline: Mapping[str, Any]
) -> list[Deviation]:
    """Returns values of another shape or type, or that only the trained update made infinite."""
    deviations = []
    for name, expected in baseline.items():
        count = int(_distance(expected, trained.get(name)).isinf().sum())
        if count:
            deviations.append(Deviation(name, math.inf, count, is_gross=True))
    return deviations


def _deviation(
    name: str, expected: Any, value: Any, spread: Tensor | None
) -> Deviation | None:
    """Returns the deviation of one value, if rounding does not explain it."""
    distance = _distance(expected, value)
    magnitude = _magnitude(expected)
    allowed = torch.full_like(distance, LEAST_ULPS * _precision(expected) * magnitude)
    if spread is not None:
        allowed = torch.maximum(allowed, TIMES * spread)
    is_beyond = distance > allowed
    count = int(is_beyond.sum())
    if count == 0:
        return None
    largest = float(distance[is_beyond].max())
    is_gross = largest > GROSS * magnitude
    if is_gross or count >= FEW * distance.numel():
        return Deviation(name, largest, count, is_gross=is_gross)

    # A switched maximum moves few elements, and rarely the same one in two updates.
    tiny = torch.finfo(allowed.dtype).tiny
    farthest = int((distance / allowed.clamp(min=tiny)).argmax())
    if not bool(distance[farthest] > FAR * allowed[farthest]):
        return None
    return Deviation(name, largest, count, is_gross=False, alone=farthest)


def _distance(expected: Any, value: Any) -> Tensor:
    """Returns the differences of the elements; infinity where they cannot be subtracted."""
    if isinstance(expected, _NUMBERS) and isinstance(value, _NUMBERS):
        expected = torch.tensor(float(expected), dtype=torch.float64)
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        distance = 0.0 if digest(expected) == digest(value) else math.inf
        return torch.tensor(distance, dtype=torch.float64)
    if expected.shape != value.shape or expected.dtype != value.dtype:
        return torch.tensor(math.inf, dtype=torch.float64)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(wide) - value.to(wide)).abs()
    difference = difference.nan_to_num(nan=math.inf, posinf=math.inf)
    # A number that is infinite or NaN in both is the same number; in one alone, it is infinitely
    # far off.
    is_same = (expected == value) | (expected.isnan() & value.isnan())
    return difference.masked_fill(is_same, 0.0).reshape(-1)


def _magnitude(value: Any) -> float:
    """Returns the largest finite number of a value."""
    if isinstance(value, Tensor):
        finite = value[value.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0
    if isinstance(value, int | float) and math.isfinite(value):
        return abs(float(value))
    return 0.0


def _precision(value: Any) -> float:
    """Returns the unit of the last digit of 1 in the type of a value; 0 for integers."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return torch.finfo(value.dtype).eps
    return torch.finfo(torch.float32).eps if isinstance(value, float) else 0.0
