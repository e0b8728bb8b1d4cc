"""Two values of one place: whether they have the same bits, and how far they are apart."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from runner.compare.isolation import Frame, Location
from runner.compare.verdict import Difference

MISSING = object()
"""Stands for a value that a frame does not have."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(value: Any) -> bytes:
    """A fingerprint of a value: of a tensor's type, shape and bits, of anything else's type and text."""
    if not isinstance(value, Tensor):
        return hashlib.blake2b(f"{type(value).__name__} {value!r}".encode(), digest_size=16).digest()
    found = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=16)
    found.update(_bits(value).cpu().numpy().data)
    return found.digest()


def digests(frame: Frame) -> dict[Location, bytes]:
    """The fingerprints of all that can be seen."""
    return {location: digest(value) for location, value in frame.items()}


def same_bits(one: Any, other: Any) -> bool:
    """Whether two values are equal in type, shape and every bit; a NaN is equal to itself, 0 is not to -0."""
    return digest(one) == digest(other)


def is_number(value: Any) -> bool:
    """Whether it is a floating-point number, or a tensor of them."""
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float | complex)


def absolute_difference(one: Any, other: Any) -> Tensor | None:
    """The absolute difference of every element, in float64 on the host; infinite where only one is finite.

    Returns:
        None if the values cannot be subtracted: they are no numbers, or of different shapes.
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
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    return _real(tensor).to("cpu", torch.float64)


def difference(update: int, location: Location, one: Any, other: Any) -> Difference:
    """Describes how the second value differs from the first, the baseline's."""

    def described(absolute: float, relative: float, elements: int, remark: str = "") -> Difference:
        return Difference(update, location.slot, str(location), absolute, relative, elements, remark)

    for value, remark in ((other, "is missing"), (one, "is there, which it is not in the baseline")):
        if value is MISSING or value is None:
            return described(math.inf, math.inf, 0, remark)
    error = absolute_difference(one, other)
    if error is None:
        return described(math.inf, math.inf, 0, f"is {_description(other)} instead of {_description(one)}")
    types = [value.dtype for value in (one, other) if isinstance(value, Tensor)]
    if len(types) == 2 and types[0] != types[1]:
        return described(math.inf, math.inf, 0, f"is of type {types[1]} instead of {types[0]}")
    absolute = float(error.max())
    size = float(as_float64(one).abs().nan_to_num(nan=0.0, posinf=0.0).max())
    differing = _bits(one) != _bits(other) if isinstance(one, Tensor) and isinstance(other, Tensor) else error > 0
    relative = absolute / size if size else math.inf if absolute else 0.0
    return described(absolute, relative, int(differing.sum()))


def _description(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _real(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _bits(tensor: Tensor) -> Tensor:
    """All elements in a row, as whole numbers."""
    flat = _real(tensor.detach()).contiguous().reshape(-1)
    return flat.view(_BITS[flat.element_size()])
