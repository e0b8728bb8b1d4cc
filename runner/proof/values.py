"""Table of the values that operators return in an update, and the search for a tensor in it."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from runner.proof.difference import FLOOR
from runner.system.tensor_trees import as_float64

LARGEST = 8_192
"""Elements up to which a value is stored completely; a larger one is sampled down to about as
many.
"""
# Largest number of pieces that form a tensor.
_MOST_PIECES = 64
# Elements of a tensor that is searched among the rows of another one; fewer may be equal without
# a reason.
_FEWEST_ELEMENTS = 4
# Dimensions of a tensor whose permutations are searched.
_MOST_DIMENSIONS = 4
# Relative difference of two norms that may be the rounding of sums in another order.
_NORMS = 1e-9
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """The stored content of a tensor.

    Attributes:
        shape: Of the tensor.
        numbers: All elements in a row, or a sample of them, in float64.
        norm: Euclidean norm of the finite numbers.
    """

    shape: Shape
    numbers: Tensor
    norm: float

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """Copies the elements of a tensor to the host, a sample of them if it is large."""
        # torch cannot reshape a sparse tensor.
        flat = tensor.detach().to_dense().reshape(-1)
        if flat.numel() > LARGEST:
            flat = flat[:: _sampling_distance(flat.numel())]
        numbers = as_float64(flat).reshape(-1)
        if tensor.dtype in (torch.float64, torch.complex128):
            numbers = numbers.clone()
        norm = float(numbers.norm())
        if not math.isfinite(norm):
            norm = float(numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm())
        return cls(tuple(tensor.shape), numbers, norm)

    @cached_property
    def size(self) -> float:
        """The largest finite absolute number."""
        finite = self.numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        return float(finite.abs().max()) if finite.numel() else 0.0

    @property
    def is_complete(self) -> bool:
        """Returns whether all elements are stored."""
        return self.numbers.numel() >= math.prod(self.shape)

    @property
    def elements(self) -> Tensor:
        """Returns all elements in their shape; pairs of numbers where they are complex."""
        is_real = self.numbers.numel() == math.prod(self.shape)
        return self.numbers.reshape(self.shape if is_real else (*self.shape, 2))


def _sampling_distance(count: int) -> int:
    """Returns a distance between sampled elements that has no common divisor with their number.

    A distance that divides the length of a row would sample the same columns of every row.
    """
    distance = 2 * (count // LARGEST) + 1
    while math.gcd(distance, count) > 1:
        distance += 1
    return distance


class Match(NamedTuple):
    """The position of a tensor in the table.

    Attributes:
        number: Number of the value, or of the first of several pieces.
        rows: The rows of the value that the tensor has; None if it has all of them.
        pieces: Numbers of all values that form the tensor.
        is_permuted: Whether the tensor has the value's elements with the dimensions in another
            order.
    """

    number: int
    rows: tuple[int, int] | None = None
    pieces: tuple[int, ...] = ()
    is_permuted: bool = False


class ValueTable:
    """Different values, numbered in the order in which they were added.

    A tensor is found although it has another shape or order of dimensions, is a part of a value, or
    consists of several values along a dimension: a change may stack, merge or split tensors.

    Args:
        tolerance: Share of a value's largest element by which elements may differ; 0 for the same
            numbers.
    """

    def __init__(self, tolerance: float) -> None:
        self.values: list[Value] = []
        self.tolerance = tolerance
        self.bytes = 0
        """Memory of the stored elements."""
        self._floor = FLOOR if tolerance else 0.0
        # Values of equal numbers have nearly equal norms: lists are sorted by them.
        self._by_count: dict[int, list[_Entry]] = defaultdict(list)
        self._by_shape: dict[Shape, list[_Entry]] = defaultdict(list)
        self._lengths: dict[tuple[int, Shape], set[int]] = defaultdict(set)
        self._rows: dict[Shape, list[tuple[int, list[int], Tensor]]] = {}

    def add(self, value: Value) -> int:
        """Returns the number of an equal value, or of this one if it is new."""
        number = self._equal_to(value, self._by_shape[value.shape])
        if number is not None:
            return number
        entry = _Entry(value.norm, len(self.values))
        self.values.append(value)
        self.bytes += value.numbers.nbytes
        insort(self._by_count[math.prod(value.shape)], entry)
        insort(self._by_shape[value.shape], entry)
        for dimension, length in enumerate(value.shape):
            self._lengths[dimension, _without(value.shape, dimension)].add(length)
        self._rows.clear()
        return entry.number

    def find(self, value: Value) -> Match | None:
        """Returns where a value is in the table; None if it is not."""
        entries = self._by_count[math.prod(value.shape)]
        number = self._equal_to(value, entries)
        if number is not None:
            return Match(number)
        number = self._permuted(value, entries)
        if number is not None:
            return Match(number, is_permuted=True)
        if not value.is_complete or not value.shape:
            return None
        return self._rows_of_one(value) or self._pieces(value)

    def equals(self, number: int, value: Value) -> bool:
        """Returns whether a value equals that of a number."""
        reference = self.values[number]
        # The size of an exact comparison is not needed, and it takes time.
        size = reference.size if self.tolerance else 0.0
        return self._are_close(reference.numbers, value.numbers, size)

    def _equal_to(self, value: Value, entries: list[_Entry]) -> int | None:
        for entry in self._with_norm(value, entries):
            if self.equals(entry.number, value):
                return entry.number
        return None

    def _with_norm(self, value: Value, entries: list[_Entry]) -> Sequence[_Entry]:
        """Returns the entries whose norm is that of a value, up to rounding."""
        allowed = self._allowed_norm(value)
        if not math.isfinite(allowed + value.norm):
            return entries
        first = bisect_left(entries, _Entry(value.norm - allowed, -1))
        last = bisect_right(entries, _Entry(value.norm + allowed, len(self.values)))
        return entries[first:last]

    def _allowed_norm(self, value: Value) -> float:
        """Returns how far the norms of a value and of an equal one may differ."""
        rounding = 2 * max(self.tolerance, _NORMS) * value.size + self._floor
        return rounding * math.sqrt(value.numbers.numel() or 1)

    def _are_close(self, reference: Tensor, numbers: Tensor, size: float) -> bool:
        if reference.shape != numbers.shape:
            return False
        if torch.equal(reference, numbers):
            return True
        allowed = self.tolerance * size + self._floor
        return torch.allclose(
            reference, numbers, rtol=0.0, atol=allowed, equal_nan=True
        )

    def _permuted(self, value: Value, entries: list[_Entry]) -> int | None:
        """Returns the number of a value that has the same elements with its dimensions in
        another order.
        """
        if not value.is_complete or not 1 < len(value.shape) <= _MOST_DIMENSIONS:
            return None
        sizes = sorted(value.shape)
        for entry in self._with_norm(value, entries):
            reference = self.values[entry.number]
            if sorted(reference.shape) != sizes:
                continue
            # Pairs of complex numbers are in one more dimension, which stays the last.
            pairs = range(len(value.shape), value.elements.dim())
            for order in itertools.permutations(range(len(value.shape))):
                permuted = value.elements.permute(*order, *pairs)
                if self._are_close(reference.elements, permuted, reference.size):
                    return entry.number
        return None

    def _rows_of_one(self, value: Value) -> Match | None:
        """Returns the value that contains this one along the first dimension, as a batch
        contains a micro-batch.
        """
        count = value.shape[0]
        if value.numbers.numel() < _FEWEST_ELEMENTS:
            return None
        if value.shape not in self._rows:
            self._rows[value.shape] = [*self._list_rows(value.shape)]
        allowed = self._allowed_norm(value)
        for number, starts, norms in self._rows[value.shape]:
            reference = self.values[number]
            is_likely = (norms - value.norm).abs() <= allowed
            for position in is_likely.nonzero().flatten().tolist():
                rows = (starts[position], starts[position] + count)
                section = reference.elements[slice(*rows)]
                if self._are_close(section, value.elements, reference.size):
                    return Match(number, rows=rows)
        return None

    def _list_rows(self, shape: Shape) -> Iterator[tuple[int, list[int], Tensor]]:
        """Yields larger values that have parts of a shape, the first rows of these parts, and
        their norms.

        Parts follow one another from the first row; the last rows are a part, too, because a last
        micro-batch is smaller than the others.
        """
        count = shape[0]
        for length in self._lengths[0, shape[1:]]:
            if length <= count:
                continue
            last = length - count
            starts = list(range(0, last + 1, max(1, count)))
            if last not in starts:
                starts.append(last)
            for entry in self._by_shape[(length, *shape[1:])]:
                reference = self.values[entry.number]
                if not reference.is_complete:
                    continue
                finite = reference.elements.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                parts = [finite[start : start + count].reshape(-1) for start in starts]
                yield entry.number, starts, torch.stack(parts).norm(dim=1)

    def _pieces(self, value: Value) -> Match | None:
        """Returns the values that form this one along a dimension, stacked or one after the
        other.
        """
        for dimension in range(len(value.shape)):
            pieces = self._pieces_along(value, dimension)
            if len(pieces) > 1:
                return Match(pieces[0], pieces=tuple(pieces))
        return None

    def _pieces_along(self, value: Value, dimension: int) -> list[int]:
        pieces: list[int] = []
        start = 0
        while start < value.shape[dimension] and len(pieces) < _MOST_PIECES:
            piece = self._piece_at(value, dimension, start)
            if piece is None:
                return []
            number, length = piece
            is_small = math.prod(self.values[number].shape) < _FEWEST_ELEMENTS
            if is_small and number in pieces:
                # A few zeros are equal to other zeros without a reason.
                return []
            pieces.append(number)
            start += length
        return pieces if start == value.shape[dimension] else []

    def _piece_at(
        self, value: Value, dimension: int, start: int
    ) -> tuple[int, int] | None:
        """Returns the largest value that this one has at a position, and its length along the
        dimension.
        """
        remaining = value.shape[dimension] - start
        slice_shape = _without(value.shape, dimension)
        for length in sorted(self._lengths[dimension, slice_shape], reverse=True):
            if length < 1 or length > remaining or length >= value.shape[dimension]:
                continue
            piece = Value.of(value.elements.narrow(dimension, start, length))
            number = self._equal_to(piece, self._by_shape[piece.shape])
            if number is not None:
                return number, length
        piece = Value.of(value.elements.select(dimension, start))
        number = self._equal_to(piece, self._by_shape[slice_shape])
        return None if number is None else (number, 1)


class _Entry(NamedTuple):
    """A value in a list that is sorted by norms."""

    norm: float
    number: int


def _without(shape: Shape, dimension: int) -> Shape:
    return shape[:dimension] + shape[dimension + 1 :]
