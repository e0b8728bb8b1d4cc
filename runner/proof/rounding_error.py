"""Errors of single updates relative to float64, and the precision in which a baseline computes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runner.proof import difference
from runner.proof.isolation import STEP, Frame, Location
from runner.proof.subject import Subject
from runner.proof.subject_states import named_parameters
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
    truth: Sequence[Frame],
    frames: Iterator[Frame],
    types: Mapping[Location, torch.dtype] = {},
) -> list[RoundingErrors]:
    """Returns the errors of each update; values of several ``types`` are in several groups."""
    usual = difference.usual_sizes(truth)
    errors = []
    for exact, frame in zip(truth, frames, strict=True):
        outputs = {location: exact[location] for location in usual if location in exact}
        update_errors = RoundingErrors(
            by_group=difference.by_group(exact, frame, types=types),
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


@dataclass(frozen=True)
class Precisions:
    """Distances of two numbers around one, by group.

    Attributes:
        by_group: The distance in the type in which the baseline computes a group.
        types: Types of gradients and parts of the state, if parameters have several.
    """

    by_group: Mapping[Location, float]
    types: Mapping[Location, torch.dtype]

    def of(self, location: Location) -> float:
        """Returns the distance in the group of a location, in any slot."""
        group = difference.rounding_group(location, self.types)
        group = group._replace(slot=STEP, visit=0)
        return self.by_group.get(group, max(self.by_group.values()))

    def of_kind(self, kind: str) -> float:
        """Returns the largest distance of all outputs, or of all gradients."""
        of_kind = [
            precision
            for group, precision in self.by_group.items()
            if group.kind == kind
        ]
        return max(of_kind or self.by_group.values())


def parameter_types(subject: Subject) -> set[torch.dtype]:
    """Returns the types of the trainable parameters; the default type if there is none."""
    parameters = named_parameters(subject).values()
    types = {parameter.dtype for parameter in parameters}
    return types or {torch.get_default_dtype()}


def value_types(frames: Iterable[Frame]) -> dict[Location, torch.dtype]:
    """Returns the types of all gradients and parts of the state that are floating-point numbers."""
    return {
        location: value.dtype
        for frame in frames
        for location, value in frame.items()
        if location.kind != "output"
        and isinstance(value, Tensor)
        and value.is_floating_point()
    }


def precisions(
    errors: Sequence[RoundingErrors],
    parameters: Collection[torch.dtype],
    types: Mapping[Location, torch.dtype],
) -> Precisions:
    """Returns the precision of every group: that of the most precise type of a parameter whose
    rounding explains the baseline's errors.

    One parameter in 16 bits does not make all others less precise.

    Args:
        errors: The baseline's errors in every update.
        parameters: Types of the parameters.
        types: Types of gradients and parts of the state.
    """
    distances = sorted(torch.finfo(dtype).eps for dtype in parameters)
    stored = {
        difference.rounding_group(location, types): torch.finfo(dtype).eps
        for location, dtype in types.items()
    }
    by_group = {}
    for group in {group for update in errors for group in update.by_group}:
        in_updates = [update.by_group.get(group, 0.0) for update in errors]
        usual = statistics.median(in_updates)
        # Rounding to the type of the group is always allowed.
        least = stored.get(group, 0.0)
        explaining = (
            eps for eps in distances if eps >= least and usual <= MOST_ULPS * eps
        )
        by_group[group] = next(explaining, max(distances[-1], least))
    return Precisions(by_group, types)
