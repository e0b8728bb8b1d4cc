"""Aromatic rings, perceived from a structural formula.

A ring, or the outline of a few fused ones, is aromatic if its atoms share 4 n + 2 electrons. Which
electrons an atom shares follows the model of RDKit (The RDKit Book, "Aromaticity").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from .rings import AtomRing, relevant_rings
from .structure import (
    AROMATIC,
    ATOMIC_NUMBERS,
    DOUBLE,
    OUTER_ELECTRONS,
    SINGLE,
    Structure,
    ring_bonds,
    valences,
)

MOST_FUSED = 6
"""Largest number of fused rings whose outline may be aromatic without a smaller part."""
LARGEST_FUSED = 24
"""Most atoms of a ring that is fused with others."""
_LAST_NUMBER = 18
"""Atoms of the first three rows can be aromatic, and those of ``_HEAVY``."""
_HEAVY = frozenset({"Se", "Te"})


def perceive(structure: Structure) -> None:
    """Marks aromatic atoms and bonds of a structure without any.

    Bonds inside the outline of fused rings remain as they are if no smaller part is aromatic.
    """
    structure.aromatic = [False] * len(structure.elements)
    in_ring = ring_bonds(structure.neighbours)
    atoms = {atom for bond in in_ring for atom in bond}
    electrons = {}
    for atom in atoms:
        shared = _shared_electrons(structure, atom, in_ring)
        if shared is not None:
            electrons[atom] = shared
    # Most molecules have no ring of such atoms, and rings need not be searched for.
    if len(electrons) < 3:
        return
    rings = [
        ring for ring in relevant_rings(in_ring) if electrons.keys() >= set(ring.atoms)
    ]
    for fused in _fused_systems(rings):
        _mark_system(structure, [rings[number] for number in fused], electrons)


def _shared_electrons(
    structure: Structure, atom: int, in_ring: Collection[tuple[int, int]]
) -> int | None:
    """Returns the number of electrons that an atom shares with a ring; None if it cannot be
    aromatic.
    """
    element = structure.elements[atom]
    charge = structure.charges[atom]
    usual = valences(element, 0)[:1]
    limit = valences(element, charge)[:1]
    # Halogens have one bond, and metals no valence.
    if not usual or usual[0] < 2:
        return None
    if ATOMIC_NUMBERS[element] > _LAST_NUMBER and element not in _HEAVY:
        return None
    if limit and structure.valence(atom) > limit[0]:
        return None
    radicals = _unpaired_electrons(structure, atom)
    if radicals and (element != "C" or charge):
        return None
    multiple = [
        end for end in structure.neighbours[atom] if structure.bond(atom, end) > SINGLE
    ]
    if len(multiple) > 1:
        return None

    ends = len(structure.neighbours[atom]) + structure.hydrogens[atom]
    if ends > 3:
        return None
    pairs = max(OUTER_ELECTRONS[element] - usual[0] - charge, 0)
    available = usual[0] - ends + pairs - radicals
    # A triple bond leaves one electron for the ring.
    if available > 1 and multiple and structure.bond(atom, multiple[0]) > DOUBLE:
        available = 1
    if available < 0:
        return None
    outer_end = None
    if multiple and (min(atom, multiple[0]), max(atom, multiple[0])) not in in_ring:
        outer_end = multiple[0]
    if available == 0:
        if outer_end is not None:
            return 0
        return 1 if multiple else None
    if available == 1 and not multiple:
        # The cations of tropylium and cyclopropenyl have an empty orbital.
        return 0 if charge == 1 else None
    if outer_end is not None and _attracts(structure.elements[outer_end], element):
        # A double bond to an oxygen, for example, takes the electron out of the ring.
        available -= 1
        if available == 0:
            return 0
    return 1 if available % 2 else 2


def _attracts(end: str, element: str) -> bool:
    """Returns whether a neighbour attracts electrons more than an atom."""
    outer = OUTER_ELECTRONS.get(end, 0)
    own_outer = OUTER_ELECTRONS[element]
    if outer != own_outer:
        return outer > own_outer
    return ATOMIC_NUMBERS[end] < ATOMIC_NUMBERS[element]


def _unpaired_electrons(structure: Structure, atom: int) -> int:
    """Returns the number of electrons without a partner at an atom whose hydrogens are written."""
    if not structure.is_complete[atom]:
        return 0
    outer = OUTER_ELECTRONS[structure.elements[atom]]
    charge = structure.charges[atom]
    missing = 8 - outer - structure.valence(atom) + charge
    free = outer - structure.valence(atom) - charge
    return max(0, min(missing, free) if free >= 0 else missing)


def _fused_systems(rings: Sequence[AtomRing]) -> Iterator[list[int]]:
    """Yields the numbers of the rings that are connected by common bonds."""
    remaining = set(range(len(rings)))
    while remaining:
        first = min(remaining)
        remaining.discard(first)
        system = [first]
        for number in system:
            fused = {
                candidate
                for candidate in remaining
                if _are_fused(rings[number], rings[candidate])
            }
            remaining -= fused
            system += sorted(fused)
        yield system


def _are_fused(left: AtomRing, right: AtomRing) -> bool:
    largest = max(len(left.atoms), len(right.atoms))
    # Rings with more than one common bond are bridged.
    return largest <= LARGEST_FUSED and len(left.bonds & right.bonds) == 1


def _mark_system(
    structure: Structure, rings: Sequence[AtomRing], electrons: dict[int, int]
) -> None:
    """Marks the aromatic rings of a fused system: single rings, then pairs, and so on, until all
    bonds are aromatic.
    """
    all_bonds = frozenset[tuple[int, int]]().union(*(ring.bonds for ring in rings))
    aromatic: set[tuple[int, int]] = set()
    for size in range(1, min(len(rings), MOST_FUSED) + 1):
        if len(aromatic) == len(all_bonds):
            break
        for parts in combinations(rings, size):
            if size > 1 and len(next(_fused_systems(parts))) < size:
                continue
            if _is_aromatic(parts, electrons):
                aromatic |= _outline(parts)
                for ring in parts:
                    for atom in ring.atoms:
                        structure.aromatic[atom] = True
    for bond in aromatic:
        # The third bond of an aryne is not shared by the ring.
        if structure.bonds[bond] <= DOUBLE:
            structure.bonds[bond] = AROMATIC


def _is_aromatic(rings: Sequence[AtomRing], electrons: dict[int, int]) -> bool:
    """Returns whether the atoms of fused rings share 4 n + 2 electrons."""
    counts: dict[int, int] = {}
    for ring in rings:
        for atom in ring.atoms:
            counts[atom] = counts.get(atom, 0) + 1
    # An atom of three rings is inside of their outline.
    total = sum(electrons[atom] for atom, count in counts.items() if count <= 2)
    return total == 2 or (total >= 6 and total % 4 == 2)


def _outline(rings: Sequence[AtomRing]) -> set[tuple[int, int]]:
    """Returns the bonds that are in one of the rings only."""
    counts: dict[tuple[int, int], int] = {}
    for ring in rings:
        for bond in ring.bonds:
            counts[bond] = counts.get(bond, 0) + 1
    return {bond for bond, count in counts.items() if count == 1}
