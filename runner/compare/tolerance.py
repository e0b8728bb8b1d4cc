"""Whether two frames are equal up to the rounding of float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from runner.compare.isolation import Frame, Location
from runner.compare.values import MISSING, absolute_difference, as_float64, is_number

TOLERANCE = 1e-9
"""Share of a group's largest number by which its numbers may differ; rounding alone gives 1e-15 to 1e-13."""
FLOOR = 1e-12
"""Rounding of numbers around one, where all numbers of a group should be zero and are not quite."""


def differing(baseline: Frame, changed: Frame, tolerance: float = TOLERANCE) -> Iterator[Location]:
    """The locations, in the baseline's order, whose numbers differ by more than rounding.

    Numbers are judged by the size of their group: an output by its own, at least one; all gradients together; all parts
    of the state that have the same last name together (``exp_avg``, ``weight``). A gradient that should be exactly zero
    is then measured with those that should not. Whole numbers and texts must be equal.
    """
    sizes = _sizes(baseline)
    for location, one in baseline.items():
        other = changed.get(location, MISSING)
        error = absolute_difference(one, other)
        if error is None:
            if isinstance(one, Tensor) or type(one) is not type(other) or one != other:
                yield location
        elif error.numel():
            allowed = tolerance * sizes[group_of(location)] + FLOOR if is_number(one) else 0.0
            if float(error.max()) > allowed:
                yield location


def group_of(location: Location) -> Location:
    """A location that stands for all that are judged by the same size."""
    if location.kind == "output":
        return location
    return location._replace(name="" if location.kind == "gradient" else location.name.rpartition(".")[2])


def _sizes(frame: Frame) -> Mapping[Location, float]:
    sizes: dict[Location, float] = {}
    for location, value in frame.items():
        group = group_of(location)
        size = 1.0 if location.kind == "output" else 0.0
        if is_number(value):
            numbers = as_float64(value).abs().nan_to_num(nan=0.0, posinf=0.0)
            size = max(size, float(numbers.max())) if numbers.numel() else size
        sizes[group] = max(size, sizes.get(group, 0.0))
    return sizes
