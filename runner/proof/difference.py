"""Differences between two values of one location, and the first location where two
subjects diverge.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.proof.counted_means import counted_more_often
from runner.proof.subject import Build
from runner.system.stored_json import json_number
from runner.system.tensor_trees import as_float64, real_numbers

if TYPE_CHECKING:
    from runner.proof.isolation import Frame, Location
    from runner.proof.trajectory import Trajectory

# Share of a group's largest number by which its numbers may differ. Rounding in float64
# gives 1e-15 to 1e-13.
TOLERANCE = 1e-9
# For a loaded state that no training has reached: Adam divides the rounding of a gradient that is
# truly zero (of keys' biases, of biases before a normalisation) by its epsilon of 1e-8, and larger
# numbers round more.
LOADED_TOLERANCE = 1e-6
# Times as far from the baseline as rounding alone takes the baseline from itself that a
# change may be, within the tolerance for loaded states.
TIMES = 100
# Share of its size by which one ulp changes a chaotic gradient.
CHAOTIC = 0.1
# Rounding of numbers around one, where all numbers of a group should be zero.
FLOOR = 1e-12
# Represents a value that a frame does not have.
MISSING = object()


@dataclass(frozen=True)
class Difference:
    """The first value that differs from the baseline's.

    Attributes:
        update: Number of the update, from 1; 0 is before the first.
        slot: The named step after which it differs; ``step`` is the entire update.
        tensor: An output, a gradient (``NAME.grad``) or a part of the state.
        absolute: The largest difference of two elements; infinite if only one of them is a
            number, or if the values cannot be subtracted.
        relative: The same as a share of the baseline's largest element.
        elements: The number of elements that differ.
        remark: A difference in something else than values: a shape, a type, a missing value.
    """

    update: int
    slot: str
    tensor: str
    absolute: float
    relative: float
    elements: int
    remark: str = ""

    def __str__(self) -> str:
        position = "before the first update"
        if self.update:
            position = f"update {self.update}, slot '{self.slot}'"
        position += f": '{self.tensor}'"
        if self.remark:
            return f"{position} {self.remark}"
        plural = "s" if self.elements != 1 else ""
        size = f"{self.absolute:.2g} ({self.relative:.2g} of its size)"
        return f"{position} differs by {size} in {self.elements:,} element{plural}"

    def data(self) -> dict[str, Any]:
        """Returns the fields for JSON: infinity is the string ``Infinity``."""
        return {name: json_number(value) for name, value in asdict(self).items()}


def described(
    update: int, location: Location, expected: Any, actual: Any
) -> Difference:
    """Describes how a value differs from the expected one, the baseline's."""
    error = absolute_difference(expected, actual)
    are_tensors = isinstance(expected, Tensor) and isinstance(actual, Tensor)
    remark = ""
    if actual is MISSING or actual is None:
        remark = "is missing"
    elif expected is MISSING or expected is None:
        remark = "is there, which it is not in the baseline"
    elif error is None:
        remark = f"is {_shown(actual)} instead of {_shown(expected)}"
    elif are_tensors and expected.dtype != actual.dtype:
        remark = f"is of type {actual.dtype} instead of {expected.dtype}"
    if error is None or remark:
        infinite = (math.inf, math.inf)
        return Difference(update, location.slot, str(location), *infinite, 0, remark)
    differs = _bits(expected) != _bits(actual) if are_tensors else error > 0
    return measured(update, location, expected, error, differs)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def measured(
    update: int, location: Location, baseline: Any, error: Tensor, differs: Tensor
) -> Difference:
    """Describes a difference in numbers.

    Args:
        update: Number of the update.
        location: Where the values were observed.
        baseline: The expected value.
        error: The absolute difference of every element.
        differs: True for every element that counts as different.
    """
    absolute = float(error.max())
    size = _largest(baseline)
    if size:
        relative = absolute / size
    else:
        relative = math.inf if absolute else 0.0
    count = int(differs.sum())
    return Difference(update, location.slot, str(location), absolute, relative, count)


def digest(value: Any) -> bytes:
    """Returns a fingerprint: of a tensor's type, shape and bits, of anything else's type
    and text.
    """
    # SHA-1 is twice as fast as BLAKE2, and states are large.
    if not isinstance(value, Tensor):
        text = f"{type(value).__name__} {value!r}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).digest()
    kind = f"{value.dtype} {tuple(value.shape)}"
    content = hashlib.sha1(kind.encode(), usedforsecurity=False)
    content.update(_bits(value).cpu().numpy().data)
    return content.digest()


def not_same_bits(baseline: Frame, changed: Frame) -> Iterator[Location]:
    """Yields the locations that differ in type, shape or a bit; a NaN is equal to itself,
    0 is not equal to -0.
    """
    return (
        location
        for location, value in baseline.items()
        if digest(value) != digest(changed.get(location, MISSING))
    )


def absolute_difference(expected: Any, actual: Any) -> Tensor | None:
    """Returns the absolute difference of every element, in float64 on the host; infinite
    if only one of them is finite.

    Returns None if the values cannot be subtracted: they are not numbers, or of different shapes.
    """
    numbers = Tensor | bool | int | float | complex
    if not all(isinstance(value, numbers) for value in (expected, actual)):
        return None
    a = as_float64(expected)
    b = as_float64(actual)
    if a.shape != b.shape:
        return None
    equal = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(equal, 0.0, (a - b).abs())
    return error.nan_to_num(nan=math.inf, posinf=math.inf)


def _is_number(value: Any) -> bool:
    """Returns whether it is a floating-point number, or a tensor of them."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float | complex)


def _largest(value: Any) -> float:
    """Returns the largest finite absolute number."""
    numbers = as_float64(value).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(numbers.max()) if numbers.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    """Returns all elements in a row, as integers."""
    flat = real_numbers(tensor.detach()).contiguous().reshape(-1)
    return flat.view(getattr(torch, f"int{8 * flat.element_size()}"))


def differing(
    baseline: Frame,
    changed: Frame,
    tolerance: float = TOLERANCE,
    perturbed: Frame | None = None,
) -> Iterator[Location]:
    """Yields the locations, in the baseline's order, whose numbers differ by more than
    rounding.

    Numbers are judged by the size of their group: an output by its size, at least one; all
    gradients together; all parts of the state that have the same last name together (``exp_avg``,
    ``weight``). A gradient that should be exactly zero is then measured with those that should not.
    Integers and texts must be equal, except that means of integers may be counted more often.

    Args:
        baseline: The expected values.
        changed: The values of the changed step.
        tolerance: Share of a group's size by which numbers may differ.
        perturbed: The baseline's values from a state that is perturbed by one ulp. If rounding
            alone moves the baseline further than the tolerance (a bias whose gradient is truly
            zero, which Adam turns into steps), that distance is allowed for the changed one, too.
    """
    sizes = _sizes(baseline)
    equal_means = set(counted_more_often(baseline, changed))
    for location, expected in baseline.items():
        if location in equal_means:
            continue
        actual = changed.get(location, MISSING)
        error = absolute_difference(expected, actual)
        if error is None:
            if digest(expected) != digest(actual):
                yield location
            continue
        size = sizes[_group_of(location)]
        allowed = tolerance * size + FLOOR if _is_number(expected) else 0.0
        if perturbed is not None:
            distance = _perturbation(expected, perturbed.get(location))
            allowed = max(allowed, min(TIMES * distance, LOADED_TOLERANCE * size))
        if bool((error > allowed).any()):
            yield location


def _perturbation(expected: Any, perturbed: Any) -> float:
    """Returns the largest distance by which a perturbation moves a value; 0 if the values
    cannot be subtracted.
    """
    error = absolute_difference(expected, perturbed)
    return float(error.max()) if error is not None and error.numel() else 0.0


def is_within_rounding(
    location: Location, expected: Any, perturbed: Any, actual: Any
) -> bool:
    """Returns whether a value is at most ``TIMES`` as far off as a perturbation moves it.

    A gradient that a perturbation changes by a tenth of its size shows nothing: it is a product of
    many factors that are all other ones, and may be larger by any power of ten.
    """
    error = absolute_difference(expected, actual)
    if error is None or not error.numel():
        return False
    perturbation = _perturbation(expected, perturbed)
    is_chaotic = perturbation >= CHAOTIC * _largest(expected) > 0
    if is_chaotic and location.kind != "output":
        return True
    return float(error.max()) <= TIMES * perturbation


def farthest(truth: Frame, frame: Frame) -> float:
    """Returns the largest error of any number, as a share of its group's largest;
    infinite if it is undefined.
    """
    sizes = _sizes(truth)
    largest = 0.0
    for location, exact in truth.items():
        error = absolute_difference(exact, frame.get(location))
        if error is None:
            return math.inf
        if error.numel():
            size = sizes[_group_of(location)] or 1.0
            largest = max(largest, float(error.max()) / size)
    return largest


def _sizes(frame: Frame) -> dict[Location, float]:
    """Returns the largest number of every group."""
    sizes: dict[Location, float] = defaultdict(float)
    for location, value in frame.items():
        least = 1.0 if location.kind == "output" else 0.0
        largest = _largest(value) if _is_number(value) else 0.0
        group = _group_of(location)
        sizes[group] = max(sizes[group], least, largest)
    return sizes


def usual_sizes(truth: Sequence[Frame]) -> dict[Location, float]:
    """Returns the size of every output, in the median of the updates in which it is finite."""
    sizes: dict[Location, list[float]] = defaultdict(list)
    for frame in truth:
        for location, exact in frame.items():
            if location.kind != "output" or not _is_number(exact):
                continue
            size = float(as_float64(exact).norm())
            if math.isfinite(size):
                sizes[location].append(size)
    return {location: statistics.median(norms) for location, norms in sizes.items()}


def relative_errors(
    truth: Frame,
    frame: Frame,
    usual: Mapping[Location, float] = {},
    types: Mapping[Location, torch.dtype] = {},
) -> dict[Location, float]:
    """Returns the Euclidean error of every number in both frames that is not a setting (a rate), by
    its group's size.

    An output's size is at least the ``usual`` one. Values with different ``types`` are in different
    groups.
    """
    errors: dict[Location, float] = {}
    sizes: dict[Location, float] = defaultdict(float)
    for location, exact in truth.items():
        error = absolute_difference(exact, frame.get(location))
        is_setting = location.kind == "state" and not isinstance(exact, Tensor)
        if error is not None and _is_number(exact) and not is_setting:
            group = _group_of(location, types)
            errors[location] = float(error.norm())
            sizes[group] = math.hypot(sizes[group], float(as_float64(exact).norm()))
    for group, size in sizes.items():
        sizes[group] = max(usual.get(group, 0.0), size)
    return {
        location: error / (sizes[_group_of(location, types)] or 1.0)
        for location, error in errors.items()
    }


def by_group(
    truth: Frame,
    frame: Frame,
    usual: Mapping[Location, float] = {},
    types: Mapping[Location, torch.dtype] = {},
) -> dict[Location, float]:
    """Returns the errors of groups after an update: all outputs, all gradients, and the state by
    its last names.
    """
    errors: dict[Location, float] = defaultdict(float)
    for location, error in relative_errors(truth, frame, usual, types).items():
        group = rounding_group(location, types)
        errors[group] = math.hypot(errors[group], error)
    return errors


def rounding_group(
    location: Location, types: Mapping[Location, torch.dtype] = {}
) -> Location:
    """Returns a location that represents all locations whose rounding is compared together."""
    if location.kind == "output":
        return location._replace(name="outputs")
    return _group_of(location, types)


def _group_of(
    location: Location, types: Mapping[Location, torch.dtype] = {}
) -> Location:
    """Returns a location that represents all locations with the same size."""
    if location.kind == "output":
        return location
    name = "" if location.kind == "gradient" else location.name.rpartition(".")[2]
    if location in types:
        name += f" of {str(types[location]).removeprefix('torch.')}"
    return location._replace(name=name)


def comparable(
    baseline: Iterable[Location], changed: Container[Location], states: Iterable[str]
) -> Iterator[Location]:
    """Yields the locations by which a subject is judged, in order, if both have the parts
    of the state with these names.

    A gradient counts if both have one: that of a step which has deleted it cannot be compared.
    """
    prefixes = tuple(f"{name}." for name in states)
    for location in baseline:
        if location.kind == "gradient":
            is_compared = location in changed
        elif location.kind == "state":
            is_compared = f"{location.name}.".startswith(prefixes)
        else:
            is_compared = True
        if is_compared:
            yield location


def compared_values(baseline: Frame, changed: Frame, states: Iterable[str]) -> Frame:
    """Returns the baseline's values at the locations of ``comparable``."""
    locations = comparable(baseline, changed, states)
    return {location: baseline[location] for location in locations}


def describe_first(
    update: int, expected: Frame, actual: Frame, locations: Iterable[Location]
) -> Difference | None:
    """Describes the difference of two frames at the first of the locations; None without one."""
    location = next(iter(locations), None)
    if location is None:
        return None
    value = actual.get(location, MISSING)
    return described(update, location, expected[location], value)


def shared(baseline: Iterable[str], changed: Iterable[str]) -> list[str]:
    """Returns the names of the parts of the state that both subjects have.

    Raises:
        ValueError: There is none to compare.
    """
    baseline_names = list(baseline)
    changed_names = list(changed)
    names = [name for name in baseline_names if name in changed_names]
    if not names:
        raise ValueError(
            f"nothing to compare: the baseline's state has the parts {baseline_names}, the "
            f"changed one's {changed_names}; give what is the same the same name"
        )
    return names


def newly_untrained(
    baseline: Collection[str], changed: Mapping[str, str]
) -> dict[str, str]:
    """Returns the parameters that a gradient reaches in the baseline alone, with what they
    receive in the changed one.
    """
    return {name: reason for name, reason in changed.items() if name not in baseline}


def locate(
    trajectory: Trajectory,
    baseline: Build,
    changed: Build,
    update: int,
    criterion: Callable[[Frame, Frame], Iterable[Location]],
) -> Difference | None:
    """Repeats an update with observed slots, and describes where the two diverge first.

    Args:
        trajectory: The updates.
        baseline: Makes the baseline.
        changed: Makes the candidate.
        update: Number of the update.
        criterion: Returns the locations of the first frame, in its order, at which the second one
            differs; it may return none this time.
    """
    expected, parts = trajectory.watched(baseline, update)
    actual, changed_parts = trajectory.watched(changed, update)
    locations = in_order(expected, actual, shared(parts, changed_parts))
    values = {location: expected.get(location, MISSING) for location in locations}
    return describe_first(update, values, actual, criterion(values, actual))


def in_order(baseline: Frame, changed: Frame, states: Sequence[str]) -> list[Location]:
    """Returns the locations in which an update may diverge, in the order of the
    baseline's computation.

    Only slots that both have called equally often in the update, and with the same
    shapes, are included: a batch in parts has other shapes. A gradient that only one of
    them has is included, too.
    """
    positions = {location.call: number for number, location in enumerate(baseline)}
    counts = _calls(baseline)
    changed_counts = _calls(changed)
    slots = {slot for slot, count in counts.items() if changed_counts[slot] == count}
    slots -= _in_other_portions(baseline, changed)
    calls = {call for call in positions if call is not None and call[0] in slots}
    new_gradients = [
        location
        for location in changed
        if location.kind == "gradient" and location not in baseline
    ]
    inner = [
        location for location in (*baseline, *new_gradients) if location.call in calls
    ]
    kinds = ("output", "gradient", "state")
    inner.sort(
        key=lambda location: (positions[location.call], kinds.index(location.kind))
    )
    outer = [location for location in baseline if location.call is None]
    return [
        *comparable(inner, set(inner), states),
        *comparable(outer, changed, states),
    ]


def _calls(frame: Frame) -> Counter[str]:
    """Returns the number of calls of each slot."""
    calls = {location.call for location in frame if location.call is not None}
    return Counter(slot for slot, _ in calls)


def _in_other_portions(baseline: Frame, changed: Frame) -> set[str]:
    """Returns the slots that return tensors with another first dimension."""
    slots = set()
    for location, value in baseline.items():
        if location.call is None or location.kind != "output":
            continue
        actual = changed.get(location)
        if not isinstance(value, Tensor) or not isinstance(actual, Tensor):
            continue
        if value.shape[1:] == actual.shape[1:] and value.shape != actual.shape:
            slots.add(location.slot)
    return slots
