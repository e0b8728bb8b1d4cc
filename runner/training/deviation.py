"""Decides whether an update as trained deviates from the baseline's by more than its contract allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.plugin.contract import Contract, Exact, Statistical
from runner.proof.difference import digest

TIMES = 200.0
"""How many times as far from the baseline as the baseline from itself, perturbed, an element may be.

Three perturbations estimate how far rounding takes an element. Less than one estimate in ten million is so far off.
"""
LEAST_ULPS = 64.0
"""Rounding of the largest number of a tensor that never counts, in units of its last digit."""
FEW = 1e-3
"""Share of a tensor's elements that chance may move further, where a maximum or a threshold switches."""
FAR = 100.0
"""How many times as far as rounding may an element is that counts alone, if it deviates in the next update, too."""
GROSS = 0.1
"""Deviation, as a share of the tensor's largest number, that no rounding explains."""


@dataclass(frozen=True)
class Deviation:
    """A tensor that deviates.

    Attributes:
        name: Its dotted path in the state, or in what the update returned.
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
        return any(
            self.name == other.name and self.alone == other.alone for other in earlier
        )

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
        trained: What the update returned and left, as it was trained.
        baseline: The same of the baseline, from the same state.
        yardsticks: The same of the baseline, perturbed, one after the other; used for ``Close``.
        contract: What the stages promise together. Of ``Statistical`` ones, only shapes, types and finite numbers
            are compared: such a stage may compute something else in an update.
    """
    if isinstance(contract, Exact):
        return _other_bits(trained, baseline)
    if isinstance(contract, Statistical):
        return _other_forms(trained, baseline)
    differing = {
        name: value
        for name, value in baseline.items()
        if digest(value) != digest(trained.get(name))
    }
    spreads: dict[str, Any] = {}
    for perturbed in yardsticks if differing else ():
        for name, expected in differing.items():
            distance = _distance(expected, perturbed.get(name))
            spreads[name] = (
                distance
                if name not in spreads
                else torch.maximum(spreads[name], distance)
            )
    deviations = [
        deviation
        for name, expected in differing.items()
        if (
            deviation := _deviation(
                name, expected, trained.get(name), spreads.get(name)
            )
        )
        is not None
    ]
    return sorted(
        deviations,
        key=lambda deviation: (deviation.is_gross, deviation.elements),
        reverse=True,
    )


def _other_bits(
    trained: Mapping[str, Any], baseline: Mapping[str, Any]
) -> list[Deviation]:
    deviations = []
    for name, expected in baseline.items():
        value = trained.get(name)
        if digest(value) != digest(expected):
            distance = _distance(expected, value)
            count = int((distance != 0).sum())
            deviations.append(
                Deviation(name, float(distance.max()), count, is_gross=True)
            )
    return deviations


def _other_forms(
    trained: Mapping[str, Any], baseline: Mapping[str, Any]
) -> list[Deviation]:
    """Returns the values of another shape or type, or that are infinite where the baseline's are not."""
    counts = {
        name: int(_distance(expected, trained.get(name)).isinf().sum())
        for name, expected in baseline.items()
    }
    return [
        Deviation(name, math.inf, count, is_gross=True)
        for name, count in counts.items()
        if count
    ]


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
    if largest > GROSS * magnitude or count >= FEW * distance.numel():
        return Deviation(name, largest, count, is_gross=largest > GROSS * magnitude)

    # A switched maximum moves few elements, but hardly the same one in two updates.
    farthest = int(
        (distance / allowed.clamp(min=torch.finfo(allowed.dtype).tiny)).argmax()
    )
    is_far = bool(distance[farthest] > FAR * allowed[farthest])
    return (
        Deviation(name, largest, count, is_gross=False, alone=farthest)
        if is_far
        else None
    )


def _distance(expected: Any, value: Any) -> Tensor:
    """Returns the differences of the elements; infinity where they cannot be subtracted."""
    if isinstance(expected, bool | int | float) and isinstance(
        value, bool | int | float
    ):
        expected, value = (
            torch.tensor(float(number), dtype=torch.float64)
            for number in (expected, value)
        )
    if not isinstance(expected, Tensor) or not isinstance(value, Tensor):
        return torch.tensor(
            0.0 if digest(expected) == digest(value) else math.inf, dtype=torch.float64
        )
    if expected.shape != value.shape or expected.dtype != value.dtype:
        return torch.tensor(math.inf, dtype=torch.float64)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (expected.to(wide) - value.to(wide)).abs()
    # A number that is infinite or NaN in both is the same number; in one alone, it is infinitely far off.
    is_same = (expected == value) | (expected.isnan() & value.isnan())
    return (
        difference.nan_to_num(nan=math.inf, posinf=math.inf)
        .masked_fill(is_same, 0.0)
        .reshape(-1)
    )


def _magnitude(value: Any) -> float:
    """Returns the largest finite number of a value."""
    if isinstance(value, Tensor):
        finite = value[value.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0
    return (
        abs(float(value))
        if isinstance(value, int | float) and math.isfinite(value)
        else 0.0
    )


def _precision(value: Any) -> float:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return torch.finfo(value.dtype).eps
    return torch.finfo(torch.float32).eps if isinstance(value, float) else 0.0
