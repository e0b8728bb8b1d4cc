"""How far the numbers of a frame are from the true ones, as a share of their size."""

from __future__ import annotations

import math
from collections import defaultdict

from torch import Tensor

from runner.compare.isolation import STEP, Frame, Place
from runner.compare.tolerance import group_of
from runner.compare.values import apart, is_number, wide

OUTPUTS, GRADIENTS = Place(STEP, "output", "outputs"), Place(STEP, "gradient", "")
"""The groups of all outputs and of all gradients of an update."""
Errors = dict[Place, float]


def numbers(frame: Frame) -> Frame:
    """Copies on the host of all that is a floating-point number, and not a setting (a learning rate)."""
    return {
        place: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for place, value in frame.items()
        if is_number(value) and (isinstance(value, Tensor) or place.kind == "output")
    }


def by_group(truth: Frame, frame: Frame) -> Errors:
    """Euclidean distances of groups of numbers, by the size of the group.

    All outputs are one group, each measured by its own size; all gradients are one; so are all parts of the state with
    the same last name. What only one of the two frames has is passed over.
    """
    distances: dict[Place, float] = defaultdict(float)
    sizes: dict[Place, float] = defaultdict(float)
    for place, (distance, size) in _lengths(truth, frame).items():
        if place.kind == "output":
            distances[OUTPUTS] += (distance / (size or 1.0)) ** 2
            sizes[OUTPUTS] = 1.0
        else:
            distances[group_of(place)] += distance**2
            sizes[group_of(place)] += size**2
    return {group: math.sqrt(total / (sizes[group] or 1.0)) for group, total in distances.items()}


def one_by_one(truth: Frame, frame: Frame) -> Errors:
    """The same for every place, by the size of its group."""
    lengths = _lengths(truth, frame)
    sizes: dict[Place, float] = defaultdict(float)
    for place, (_, size) in lengths.items():
        sizes[group_of(place)] = math.hypot(sizes[group_of(place)], size)
    return {place: distance / (sizes[group_of(place)] or 1.0) for place, (distance, _) in lengths.items()}


def _lengths(truth: Frame, frame: Frame) -> dict[Place, tuple[float, float]]:
    """The distance of every place, and the size of what it should be."""
    found = {}
    for place, exact in truth.items():
        distance = apart(exact, frame.get(place))
        if distance is not None and is_number(exact):
            found[place] = float(distance.norm()), float(wide(exact).norm())
    return found
