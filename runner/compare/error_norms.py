"""How far the numbers of a frame are from the true ones, as a share of their size."""

from __future__ import annotations

import math
from collections import defaultdict

from torch import Tensor

from runner.compare.isolation import STEP, Frame, Location
from runner.compare.tolerance import group_of
from runner.compare.values import absolute_difference, as_float64, is_number

OUTPUTS, GRADIENTS = Location(STEP, "output", "outputs"), Location(STEP, "gradient", "")
"""The groups of all outputs and of all gradients of an update."""
Errors = dict[Location, float]


def numbers(frame: Frame) -> Frame:
    """Copies on the host of all that is a floating-point number, and not a setting (a learning rate)."""
    return {
        location: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for location, value in frame.items()
        if is_number(value) and (isinstance(value, Tensor) or location.kind == "output")
    }


def by_group(truth: Frame, frame: Frame) -> Errors:
    """Euclidean errors of groups of numbers, by the size of the group.

    All outputs are one group, each measured by its own size; all gradients are one; so are all parts of the state with
    the same last name. What only one of the two frames has is passed over.
    """
    errors: dict[Location, float] = defaultdict(float)
    norms_of_truth: dict[Location, float] = defaultdict(float)
    for location, (error, size) in _norms(truth, frame).items():
        if location.kind == "output":
            errors[OUTPUTS] += (error / (size or 1.0)) ** 2
            norms_of_truth[OUTPUTS] = 1.0
        else:
            errors[group_of(location)] += error**2
            norms_of_truth[group_of(location)] += size**2
    return {group: math.sqrt(total / (norms_of_truth[group] or 1.0)) for group, total in errors.items()}


def one_by_one(truth: Frame, frame: Frame) -> Errors:
    """The same for every location, by the size of its group."""
    norms = _norms(truth, frame)
    norms_of_truth: dict[Location, float] = defaultdict(float)
    for location, (_, size) in norms.items():
        norms_of_truth[group_of(location)] = math.hypot(norms_of_truth[group_of(location)], size)
    return {location: error / (norms_of_truth[group_of(location)] or 1.0) for location, (error, _) in norms.items()}


def _norms(truth: Frame, frame: Frame) -> dict[Location, tuple[float, float]]:
    """The error of every location, and the size of what it should be."""
    found = {}
    for location, exact in truth.items():
        error = absolute_difference(exact, frame.get(location))
        if error is not None and is_number(exact):
            found[location] = float(error.norm()), float(as_float64(exact).norm())
    return found
