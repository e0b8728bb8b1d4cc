"""Errors of single updates relative to float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from runner.proof import difference
from runner.proof.isolation import Frame, Location

MOST_ULPS = 64.0
"""Units of rounding, at most, where many numbers are added up; 16 bits are off by 65,000, TF32 by 8,000."""
_Factors = dict[str, float]  # by kind of location: a share, zero where nothing is wrong


class Inaccuracy(NamedTuple):
    """The errors of an update."""

    by_group: dict[Location, float]  # as a share of the values
    by_usual_size: dict[Location, float]  # of outputs, as a share of the median values
    factors: _Factors


def inaccuracies(truth: Sequence[Frame], frames: Iterator[Frame]) -> list[Inaccuracy]:
    """Returns the errors of each update."""
    usual, found = difference.usual_sizes(truth), list[Inaccuracy]()
    for exact, frame in zip(truth, frames, strict=True):
        outputs = {location: exact[location] for location in usual if location in exact}
        by_group, by_usual_size = difference.by_group(exact, frame), difference.by_group(outputs, frame, usual)
        found.append(Inaccuracy(by_group, by_usual_size, _factors(exact, frame)))
    return found


def _factors(truth: Frame, frame: Frame) -> _Factors:
    """Returns the share by which all gradients together are longer than they should be,
    and all outputs.

    The rounding of sums has no direction; a factor has.
    """
    along, squares = defaultdict[str, float](float), defaultdict[str, float](float)
    for location, exact in truth.items():
        value = frame.get(location)
        if location.kind != "state" and isinstance(exact, Tensor) and isinstance(value, Tensor):
            one, other = difference.as_float64(exact), difference.as_float64(value)
            if one.shape == other.shape:
                along[location.kind] += float(((other - one) * one).sum())
                squares[location.kind] += float(one.square().sum())
    return {kind: along[kind] / square for kind, square in squares.items() if square}
