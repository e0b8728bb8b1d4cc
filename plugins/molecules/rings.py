"""The smallest rings of a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import combinations
from typing import NamedTuple


class AtomRing(NamedTuple):
    """Atoms of a ring in their order, and its bonds, the smaller number first."""

    atoms: tuple[int, ...]
    bonds: frozenset[tuple[int, int]]


class _Distances(NamedTuple):
    """Distances from an atom by atom, and the atoms before each on the shortest paths."""

    steps: dict[int, int]
    previous: dict[int, list[int]]


def relevant_rings(
    in_ring: Collection[tuple[int, int]],
) -> list[AtomRing]:
    """Returns the rings that smaller ones cannot be combined to (Vismara 1997).

    They are the union of all smallest sets of smallest rings, so they do not depend on the numbers
    of the atoms.

    Args:
        in_ring: Bonds that are in a ring.
    """
    adjacent: dict[int, list[int]] = {}
    for start, end in sorted(in_ring):
        adjacent.setdefault(start, []).append(end)
        adjacent.setdefault(end, []).append(start)
    distances = {atom: _distances(adjacent, atom) for atom in adjacent}
    numbers = {bond: number for number, bond in enumerate(sorted(in_ring))}
    missing = len(in_ring) - len(adjacent) + _components(distances)

    rings: list[AtomRing] = []
    # Sets of bonds as bits of a number; no two have the same highest bit.
    basis: dict[int, int] = {}
    length = 3
    while len(basis) < missing:
        independent: dict[int, AtomRing] = {}
        for ring in _rings(adjacent, distances, length):
            bits = sum(1 << numbers[bond] for bond in ring.bonds)
            if bits not in independent and _reduced(bits, basis):
                independent[bits] = ring
        for bits, ring in independent.items():
            rings.append(ring)
            remainder = _reduced(bits, basis)
            if remainder:
                basis[remainder.bit_length()] = remainder
        length += 1
    return rings


def _distances(adjacent: dict[int, list[int]], start: int) -> _Distances:
    steps = {start: 0}
    previous: dict[int, list[int]] = {start: []}
    queue = deque([start])
    while queue:
        atom = queue.popleft()
        for end in adjacent[atom]:
            if end not in steps:
                steps[end] = steps[atom] + 1
                previous[end] = [atom]
                queue.append(end)
            elif steps[end] == steps[atom] + 1:
                previous[end].append(atom)
    return _Distances(steps, previous)


def _components(distances: dict[int, _Distances]) -> int:
    """Returns the number of connected parts."""
    return len({min(reached.steps) for reached in distances.values()})


def _reduced(bits: int, basis: dict[int, int]) -> int:
    """Returns what remains of a set of bonds after those of a basis; zero if it is a combination of
    them.
    """
    while bits and bits.bit_length() in basis:
        bits ^= basis[bits.bit_length()]
    return bits


def _rings(
    adjacent: dict[int, list[int]], distances: dict[int, _Distances], length: int
) -> Iterator[AtomRing]:
    """Yields the rings of a length that consist of two shortest paths from their smallest atom."""
    half = length // 2
    for start, (steps, previous) in distances.items():
        far = [atom for atom, count in steps.items() if count == half and atom > start]
        for atom in far:
            # An odd ring ends with a bond between the paths, an even one with a common atom.
            if length % 2:
                ends = [
                    (atom, end)
                    for end in adjacent[atom]
                    if end > atom and steps[end] == half
                ]
            else:
                ends = list(combinations(previous[atom], 2))
            for left_end, right_end in ends:
                for left_path in _paths(left_end, start, previous):
                    for right_path in _paths(right_end, start, previous):
                        if set(left_path).isdisjoint(right_path):
                            last = () if length % 2 else (atom,)
                            yield _ring(
                                (start, *left_path, *last, *reversed(right_path))
                            )


def _paths(
    end: int, start: int, previous: dict[int, list[int]]
) -> Iterator[tuple[int, ...]]:
    """Yields the shortest paths to an atom over atoms with larger numbers, without their start."""
    if end == start:
        yield ()
        return
    if end < start:
        return
    for neighbour in previous[end]:
        for path in _paths(neighbour, start, previous):
            yield (*path, end)


def _ring(atoms: tuple[int, ...]) -> AtomRing:
    pairs = zip(atoms, (*atoms[1:], atoms[0]), strict=True)
    return AtomRing(atoms, frozenset((min(pair), max(pair)) for pair in pairs))
