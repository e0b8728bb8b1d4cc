"""Differences between two values of one location, and the first location where two
subjects diverge.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.proof.isolation import Frame, Location
from runner.proof.subject import Build

if TYPE_CHECKING:
    from runner.proof.trajectory import Trajectory

TOLERANCE = 1e-9  # share of a group's largest number by which its numbers may differ; rounding gives 1e-15 to 1e-13
# For a loaded state that no training has reached: Adam divides the rounding of a gradient that is
# truly zero (of keys' biases, of biases before a normalisation) by its epsilon of 1e-8, and larger
# numbers round more.
LOADED_TOLERANCE = 1e-6
TIMES = 100  # as far as units of rounding take the baseline from itself, a change may, within the tolerance above
FLOOR = 1e-12  # rounding of numbers around one, where all numbers of a group should be zero and are not quite
MISSING = object()  # represents a value that a frame does not have


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as in the baseline."""

    update: int  # counted from 1; 0 is before the first
    slot: str  # the named step after which it differs; ``step`` is the entire update
    tensor: str  # an output, a gradient (``NAME.grad``) or a part of the state
    absolute: float  # the largest of two elements; infinite where only one is a number, or nothing can be subtracted
    relative: float  # the same as a share of the baseline's largest element
    elements: int  # how many differ
    remark: str = ""  # a difference in something else than values: a shape, a type, a missing value

    def __str__(self) -> str:
        when = f"update {self.update}, slot '{self.slot}'" if self.update else "before the first update"
        where = f"{when}: '{self.tensor}'"
        if self.remark:
            return f"{where} {self.remark}"
        count = f"{self.elements:,} element{'s' if self.elements != 1 else ''}"
        return f"{where} differs by {self.absolute:.2g} ({self.relative:.2g} of its size) in {count}"

    def data(self) -> dict[str, Any]:
        """Returns the fields for JSON: infinity is the string ``Infinity``."""
        return {name: plain(value) for name, value in asdict(self).items()}


def plain(value: Any) -> Any:
    """A number that is not finite as a string, because JSON has none; anything else as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def described(update: int, location: Location, one: Any, other: Any) -> Difference:
    """Describes how the second value differs from the first, the baseline's."""
    error, remark = absolute_difference(one, other), ""
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    if other is MISSING or other is None:
        remark = "is missing"
    elif one is MISSING or one is None:
        remark = "is there, which it is not in the baseline"
    elif error is None:
        remark = f"is {_shown(other)} instead of {_shown(one)}"
    elif both and one.dtype != other.dtype:
        remark = f"is of type {other.dtype} instead of {one.dtype}"
    if error is None or remark:
        return Difference(update, location.slot, str(location), math.inf, math.inf, 0, remark)
    return measured(update, location, one, error, _bits(one) != _bits(other) if both else error > 0)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def measured(update: int, location: Location, baseline: Any, error: Tensor, differs: Tensor) -> Difference:
    """A difference in numbers."""
    absolute, size = float(error.max()), _largest(baseline)
    relative = absolute / size if size else math.inf if absolute else 0.0
    return Difference(update, location.slot, str(location), absolute, relative, int(differs.sum()))


def digest(value: Any) -> bytes:
    """A fingerprint: of a tensor's type, shape and bits, of anything else's type and text."""
    tensor = isinstance(value, Tensor)
    kind = f"{value.dtype} {tuple(value.shape)}" if tensor else f"{type(value).__name__} {value!r}"
    found = hashlib.sha1(kind.encode(), usedforsecurity=False)  # twice as fast as BLAKE2; states are large
    if tensor:
        found.update(_bits(value).cpu().numpy().data)
    return found.digest()


def not_same_bits(baseline: Frame, changed: Frame) -> Iterator[Location]:
    """The locations that differ in type, shape or a bit; a NaN is equal to itself, 0 is not to -0."""
    return (place for place, value in baseline.items() if digest(value) != digest(changed.get(place, MISSING)))


def absolute_difference(one: Any, other: Any) -> Tensor | None:
    """The absolute difference of every element, in float64 on the host; infinite where only one is finite.

    Returns None if the values cannot be subtracted: they are not numbers, or of different shapes.
    """
    if not all(isinstance(value, Tensor | bool | int | float | complex) for value in (one, other)):
        return None
    a, b = as_float64(one), as_float64(other)
    if a.shape != b.shape:
        return None
    equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(equal, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def as_float64(value: Any) -> Tensor:
    """A number or a tensor of numbers as a tensor of float64 (complex: pairs of them) on the host."""
    if not isinstance(value, Tensor):  # which torch would round to its default type
        value = torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
    return _real(value.detach()).to("cpu", torch.float64)


def _is_number(value: Any) -> bool:
    """Returns whether it is a floating-point number, or a tensor of them."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float | complex)


def _largest(value: Any) -> float:
    """Returns the largest finite absolute number."""
    found = as_float64(value).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(found.max()) if found.numel() else 0.0


def _real(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _bits(tensor: Tensor) -> Tensor:
    """Returns all elements in a row, as integers."""
    flat = _real(tensor.detach()).contiguous().reshape(-1)
    return flat.view(getattr(torch, f"int{8 * flat.element_size()}"))


def differing(
    baseline: Frame, changed: Frame, tolerance: float = TOLERANCE, jogged: Frame | None = None
) -> Iterator[Location]:
    """The locations, in the baseline's order, whose numbers differ by more than rounding.

    Numbers are judged by the size of their group: an output by its size, at least one; all
    gradients together; all parts of the state that have the same last name together (``exp_avg``,
    ``weight``). A gradient that should be exactly zero is then measured with those that should not.
    Integers and texts must be equal.

    If rounding alone moves the baseline further (``jogged``: a bias whose gradient is truly zero,
    which Adam turns into steps), that distance is allowed for the changed one, too.
    """
    sizes = _sizes(baseline)
    for location, one in baseline.items():
        other = changed.get(location, MISSING)
        error = absolute_difference(one, other)
        size = sizes[_group_of(location)]
        allowed = tolerance * size + FLOOR if _is_number(one) else 0.0
        if (
            jogged is not None
            and error is not None
            and (own := absolute_difference(one, jogged.get(location))) is not None
        ):
            allowed = max(allowed, min(TIMES * float(own.max()) if own.numel() else 0.0, LOADED_TOLERANCE * size))
        if digest(one) != digest(other) if error is None else bool((error > allowed).any()):
            yield location


def farthest(truth: Frame, frame: Frame) -> float:
    """Returns the largest error of any number, as a share of its group's largest;
    infinite if it is undefined.
    """
    sizes, found = _sizes(truth), 0.0
    for location, exact in truth.items():
        error = absolute_difference(exact, frame.get(location))
        if error is None:
            return math.inf
        if error.numel():
            found = max(found, float(error.max()) / (sizes[_group_of(location)] or 1.0))
    return found


def _sizes(frame: Frame) -> dict[Location, float]:
    """The largest number of every group."""
    sizes: dict[Location, float] = defaultdict(float)
    for location, value in frame.items():
        least = 1.0 if location.kind == "output" else 0.0
        group = _group_of(location)
        sizes[group] = max(sizes[group], least, _largest(value) if _is_number(value) else 0.0)
    return sizes


def usual_sizes(truth: Sequence[Frame]) -> dict[Location, float]:
    """Returns the size of every output, in the median of the updates in which it is finite."""
    sizes: dict[Location, list[float]] = defaultdict(list)
    for frame in truth:
        for location, exact in frame.items():
            size = float(as_float64(exact).norm()) if location.kind == "output" and _is_number(exact) else math.nan
            if math.isfinite(size):
                sizes[location].append(size)
    return {location: statistics.median(found) for location, found in sizes.items()}


def relative_errors(truth: Frame, frame: Frame, usual: Mapping[Location, float] = {}) -> dict[Location, float]:
    """Returns the Euclidean error of every number in both frames that is not a setting (a rate), by
    its group's size.

    An output's size is at least the ``usual`` one.
    """
    errors: dict[Location, float] = {}
    sizes: dict[Location, float] = defaultdict(float)
    for location, exact in truth.items():
        error = absolute_difference(exact, frame.get(location))
        is_setting = location.kind == "state" and not isinstance(exact, Tensor)
        if error is not None and _is_number(exact) and not is_setting:
            group = _group_of(location)
            errors[location] = float(error.norm())
            sizes[group] = math.hypot(sizes[group], float(as_float64(exact).norm()))
    sizes |= {location: max(usual.get(location, 0.0), size) for location, size in sizes.items()}
    return {location: error / (sizes[_group_of(location)] or 1.0) for location, error in errors.items()}


def by_group(truth: Frame, frame: Frame, usual: Mapping[Location, float] = {}) -> dict[Location, float]:
    """Returns the errors of groups after an update: all outputs, all gradients, and the state by
    its last names.
    """
    found: dict[Location, float] = defaultdict(float)
    for location, error in relative_errors(truth, frame, usual).items():
        group = location._replace(name="outputs") if location.kind == "output" else _group_of(location)
        found[group] = math.hypot(found[group], error)
    return found


def _group_of(location: Location) -> Location:
    """Returns a location that represents all locations with the same size."""
    if location.kind == "output":
        return location
    return location._replace(name="" if location.kind == "gradient" else location.name.rpartition(".")[2])


def comparable(baseline: Iterable[Location], changed: Container[Location], states: Iterable[str]) -> Iterator[Location]:
    """The locations by which a subject is judged, in order, if both have the parts of the state with these names.

    A gradient counts if both have one: that of a step which has deleted it cannot be compared.
    """
    prefixes = tuple(f"{name}." for name in states)
    for location in baseline:
        kept = location in changed if location.kind == "gradient" else f"{location.name}.".startswith(prefixes)
        if kept or location.kind == "output":
            yield location


def shared(baseline: Iterable[str], changed: Iterable[str]) -> list[str]:
    """The names of the parts of the state that both subjects have; ``ValueError`` if there is none to compare."""
    own, theirs = list(baseline), list(changed)
    names = [name for name in own if name in theirs]
    if not names:
        parts = f"the baseline's state has the parts {own}, the changed one's {theirs}"
        raise ValueError(f"nothing to compare: {parts}; give what is the same the same name")
    return names


def newly_untrained(baseline: Collection[str], changed: Mapping[str, str]) -> dict[str, str]:
    """The parameters that a gradient reaches in the baseline alone, with what they receive in the changed one."""
    return {name: reason for name, reason in changed.items() if name not in baseline}


def locate(
    trajectory: Trajectory, baseline: Build, changed: Build, update: int,
    criterion: Callable[[Frame, Frame], Iterable[Location]],
) -> Difference | None:  # fmt: skip
    """Makes them once more, with slots that show what they returned, to find where an update parts.

    The criterion gives the locations of the first frame, in its order, at which the second is not as it should be; it
    may find none this time.
    """
    one, parts = trajectory.watched(baseline, update)
    other, changed_parts = trajectory.watched(changed, update)
    seen = {location: one.get(location, MISSING) for location in in_order(one, other, shared(parts, changed_parts))}
    location = next(iter(criterion(seen, other)), None)
    return None if location is None else described(update, location, seen[location], other.get(location, MISSING))


def in_order(one: Frame, other: Frame, states: Sequence[str]) -> list[Location]:
    """Returns the locations in which an update may diverge, in the order of the
    baseline's computation.

    Only slots that both have called equally often in the update, and with the same
    shapes, are included: a batch in parts has other shapes. A gradient that only one of
    them has is included, too.
    """
    returned = {location.call: number for number, location in enumerate(one)}
    calls, other_calls = _calls(one), _calls(other)
    alike = {slot for slot, count in calls.items() if other_calls[slot] == count} - _in_other_portions(one, other)
    both = {call for call in returned if call is not None and call[0] in alike}
    new = [location for location in other if location.kind == "gradient" and location not in one]
    inner = [location for location in (*one, *new) if location.call in both]
    inner.sort(key=lambda location: (returned[location.call], ("output", "gradient", "state").index(location.kind)))
    outer = [location for location in one if location.call is None]
    return [*comparable(inner, set(inner), states), *comparable(outer, other, states)]


def _calls(frame: Frame) -> Counter[str]:
    """Returns the number of calls of each slot."""
    return Counter(slot for slot, _ in {location.call for location in frame if location.call is not None})


def _in_other_portions(one: Frame, other: Frame) -> set[str]:
    """Returns the slots that return tensors with another first dimension."""
    found = set()
    for location, value in one.items():
        theirs = other.get(location)
        if location.call is None or not isinstance(value, Tensor) or not isinstance(theirs, Tensor):
            continue
        if location.kind == "output" and value.shape[1:] == theirs.shape[1:] and value.shape != theirs.shape:
            found.add(location.slot)
    return found
