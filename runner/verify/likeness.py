"""Compares two outputs: their form, and their content up to rounding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.proof.counted_means import counted_more_often
from runner.proof.difference import (
    MISSING,
    Difference,
    absolute_difference,
    described,
    digest,
)
from runner.proof.isolation import Frame, Location
from runner.system.tensor_trees import as_float64

CONTENT = 1e-4
"""Largest relative difference of an element where a source depends on what was learned."""
# Their rounding errors accumulate.
_OUTPUT = 1e-3
"""The same for the results of the first updates."""


def unlike(
    expected: Frame,
    actual: Frame,
    form: bool,
    content: float = CONTENT,
    share: float = 0.0,
    rounded: bool = False,
) -> Location | None:
    """Returns the first output that differs from the baseline's; None without one.

    Args:
        expected: Values of the baseline.
        actual: The candidate's.
        form: Whether only the form of numbers counts.
        content: Largest relative difference of an element.
        share: Share of elements that may differ by more.
        rounded: Whether results of updates may differ by more, because of rounding.
    """
    equal_means = set(counted_more_often(expected, actual))
    for location in dict.fromkeys((*expected, *actual)):
        if location.kind != "output" or location in equal_means:
            continue
        is_result = rounded and is_output(location.name)
        value = expected.get(location, MISSING)
        counterpart = actual.get(location, MISSING)
        if is_result and isinstance(value, float) and isinstance(counterpart, float):
            value, counterpart = map(as_float64, (value, counterpart))
        if not isinstance(value, Tensor) or location.name.startswith("generators."):
            is_same = digest(value) == digest(counterpart)
        else:
            is_same = _same_form(value, counterpart) and (
                form or _same_content(value, counterpart, content, share, is_result)
            )
        if not is_same:
            return location
    return None


def describe(
    number: int, location: Location, expected: Frame, actual: Frame
) -> Difference:
    """Returns how a value differs from the baseline's in an update of this number."""
    values = (frame.get(location, MISSING) for frame in (expected, actual))
    return described(number, location, *values)


def is_output(path: str) -> bool:
    """Returns whether a value is what an update returned."""
    return path.partition(".")[0] == "output"


def _same_form(expected: Tensor, actual: Any) -> bool:
    """Returns whether a value has the form of a tensor, and is finite where that is."""
    if not isinstance(actual, Tensor) or actual.dtype != expected.dtype:
        return False
    if actual.shape != expected.shape:
        return False
    return bool((expected.isfinite() <= actual.isfinite()).all())


def _same_content(
    expected: Tensor, actual: Tensor, content: float, share: float, is_result: bool
) -> bool:
    error = absolute_difference(expected, actual)
    if error is None or not error.numel():
        return True
    # A count, for example of correct predictions, may be off by one.
    tolerance = float(is_result)
    if expected.is_floating_point():
        size = float(expected.detach().abs().max())
        if not expected.dim():
            # A mean may be nearly zero.
            size = max(size, 1.0)
        tolerance = size * (max(content, _OUTPUT) if is_result else content)
    return float((error > tolerance).double().mean()) <= share
