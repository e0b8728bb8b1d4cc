"""Errors of single updates relative to float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from runner.proof import difference
from runner.proof.isolation import Frame, Location
from runner.system.tensor_trees import as_float64

# Units of rounding, at most, where many numbers are added. Numbers of 16 bits are off by 65,000
# units, TF32 by 8,000.
MOST_ULPS = 64.0


class RoundingErrors(NamedTuple):
    """The errors of an update.

    Attributes:
        by_group: Error of each group as a share of its values.
        by_usual_size: Error of outputs as a share of their values in the median of all updates.
        factors: Systematic error by the kind of a location; zero where nothing is wrong.
    """

    by_group: dict[Location, float]
    by_usual_size: dict[Location, float]
    factors: dict[str, float]


def rounding_errors(
    truth: Sequence[Frame], frames: Iterator[Frame]
) -> list[RoundingErrors]:
    """Returns the errors of each update."""
    usual = difference.usual_sizes(truth)
    errors = []
    for exact, frame in zip(truth, frames, strict=True):
        outputs = {location: exact[location] for location in usual if location in exact}
        update_errors = RoundingErrors(
            by_group=difference.by_group(exact, frame),
            by_usual_size=difference.by_group(outputs, frame, usual),
            factors=_factors(exact, frame),
        )
        errors.append(update_errors)
    return errors


def _factors(truth: Frame, frame: Frame) -> dict[str, float]:
    """Returns the share by which all gradients together are longer than they should be,
    and all outputs.

    The rounding of sums has no direction; a factor has.
    """
    along: defaultdict[str, float] = defaultdict(float)
    squares: defaultdict[str, float] = defaultdict(float)
    for location, exact in truth.items():
        value = frame.get(location)
        are_tensors = isinstance(exact, Tensor) and isinstance(value, Tensor)
        if location.kind == "state" or not are_tensors:
            continue
        expected = as_float64(exact)
        actual = as_float64(value)
        if expected.shape == actual.shape:
            along[location.kind] += float(((actual - expected) * expected).sum())
            squares[location.kind] += float(expected.square().sum())
    return {kind: along[kind] / square for kind, square in squares.items() if square}
