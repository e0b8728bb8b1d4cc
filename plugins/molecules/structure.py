"""Structural formulas: valences, hydrogens, charges, and double bonds of aromatic rings."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

SINGLE = 1
DOUBLE = 2
TRIPLE = 3
AROMATIC = 4
"""Kinds of bonds; the first three are the order of the bond."""
_ROWS = ("B C N O F", "Al Si P S Cl", "Ga Ge As Se Br", "In Sn Sb Te I")
"""Elements with 3 to 7 outer electrons, by row of the periodic table."""
_FIRST_OUTER = 3
OUTER_ELECTRONS = {
    element: outer
    for row in _ROWS
    for outer, element in enumerate(row.split(), _FIRST_OUTER)
}
ATOMIC_NUMBERS = {
    element: first + step
    for first, row in zip((5, 13, 31, 49), _ROWS, strict=True)
    for step, element in enumerate(row.split())
}
_VALENCES = {
    3: (3,),
    4: (4,),
    5: (3, 5, 7),
    6: (2, 4, 6),
    7: (1, 3, 5),
}
"""Valences by the number of outer electrons, from the third row of the periodic table on."""
_SECOND_ROW = frozenset(["B", "C", "N", "O", "F"])


@dataclass
class Structure:
    """A structural formula: lists by atom, and the kind of every bond."""

    elements: list[str]
    charges: list[int]
    aromatic: list[bool]
    hydrogens: list[int]
    """Hydrogens of each atom; before ``complete``, only those that the text contains."""
    is_complete: list[bool]
    """Whether the text contains all hydrogens of an atom, as it does in brackets."""
    bonds: dict[tuple[int, int], int]
    """Kinds of bonds, by the numbers of their atoms, the smaller one first."""
    neighbours: list[list[int]]
    """Neighbours of each atom, in the order of the text."""

    def bond(self, start: int, end: int) -> int:
        """Returns the kind of a bond between two atoms in any order."""
        return self.bonds[min(start, end), max(start, end)]

    def set_bond(self, start: int, end: int, kind: int) -> None:
        """Changes the kind of a bond."""
        self.bonds[min(start, end), max(start, end)] = kind

    def orders(self, atom: int) -> int:
        """Returns the sum of an atom's bond orders; an aromatic bond counts as a single one."""
        kinds = [self.bond(atom, end) for end in self.neighbours[atom]]
        return sum(SINGLE if kind == AROMATIC else kind for kind in kinds)

    def valence(self, atom: int) -> int:
        """Returns the sum of an atom's bond orders and hydrogens."""
        return self.orders(atom) + self.hydrogens[atom]


def valences(element: str, charge: int) -> tuple[int, ...]:
    """Returns the valences of an atom, the usual one first; none for metals.

    An ion has the valences of the element with as many electrons.
    """
    outer = OUTER_ELECTRONS.get(element)
    if outer is None:
        return ()
    neutral = _VALENCES.get(outer - charge, ())
    # Atoms of the second row have no room for more than eight electrons.
    return neutral[:1] if element in _SECOND_ROW else neutral


def complete(structure: Structure) -> None:
    """Separates charges, adds the hydrogens that the text implies, and replaces aromatic bonds
    by single and double ones, so that the structure does not depend on how it was written.

    Raises:
        ValueError: An aromatic atom is in no ring, or single and double bonds cannot alternate.
    """
    in_ring = ring_bonds(structure.neighbours)
    atoms_of_rings = {atom for bond in in_ring for atom in bond}
    for pair, kind in structure.bonds.items():
        # The text omits single bonds as well as aromatic ones between aromatic atoms.
        if kind == AROMATIC and pair not in in_ring:
            structure.bonds[pair] = SINGLE
    for atom, is_aromatic in enumerate(structure.aromatic):
        if is_aromatic and atom not in atoms_of_rings:
            raise ValueError(
                f"atom {atom + 1}, '{structure.elements[atom].lower()}', is written as aromatic "
                "and is in no ring"
            )
    for atom, element in enumerate(structure.elements):
        if element == "N" and structure.charges[atom] == 0:
            _separate_charges(structure, atom)
    for atom in range(len(structure.elements)):
        if not structure.is_complete[atom]:
            structure.hydrogens[atom] += _implied_hydrogens(structure, atom)
    if any(structure.aromatic):
        _set_double_bonds(structure)


def _separate_charges(structure: Structure, nitrogen: int) -> None:
    """Rewrites a nitrogen with five bonds: N(=O)=O as [N+](=O)[O-], and N=N#N as N=[N+]=[N-]."""
    aromatic_bonds = sum(
        structure.bond(nitrogen, end) == AROMATIC
        for end in structure.neighbours[nitrogen]
    )
    # Two aromatic bonds are a single and a double one.
    if structure.valence(nitrogen) + aromatic_bonds // 2 != 5:
        return
    for end in structure.neighbours[nitrogen]:
        bond = (structure.elements[end], structure.bond(nitrogen, end))
        if bond in (("O", DOUBLE), ("N", TRIPLE)) and structure.charges[end] == 0:
            structure.set_bond(nitrogen, end, bond[1] - 1)
            structure.charges[nitrogen] = 1
            structure.charges[end] = -1
            return


def _implied_hydrogens(structure: Structure, atom: int) -> int:
    element = structure.elements[atom]
    bonds = structure.valence(atom)
    if structure.aromatic[atom]:
        # One more electron of an aromatic carbon is in a double bond or shared by the ring. The
        # hydrogen of another aromatic atom has to be written.
        return max(0, 3 - bonds) if element == "C" else 0
    allowed = valences(element, structure.charges[atom])
    return next((valence - bonds for valence in allowed if valence >= bonds), 0)


def _set_double_bonds(structure: Structure) -> None:
    """Replaces aromatic bonds by single and double ones: every atom with a missing bond
    gets one double bond.
    """
    lacking = {
        atom
        for atom, is_aromatic in enumerate(structure.aromatic)
        if is_aromatic and _lacks_double_bond(structure, atom)
    }
    aromatic = [pair for pair, kind in structure.bonds.items() if kind == AROMATIC]
    partners: dict[int, set[int]] = {atom: set() for atom in lacking}
    for start, end in aromatic:
        structure.bonds[start, end] = SINGLE
        if start in lacking and end in lacking:
            partners[start].add(end)
            partners[end].add(start)
    for start, end in _pairs(partners):
        structure.set_bond(start, end, DOUBLE)


def _lacks_double_bond(structure: Structure, atom: int) -> bool:
    bonds = structure.valence(atom)
    allowed = valences(structure.elements[atom], structure.charges[atom])
    missing = next((valence - bonds for valence in allowed if valence >= bonds), 0)
    # Without a hydrogen, an atom in brackets may be a radical.
    return missing == 1 or (missing == 2 and structure.is_complete[atom])


def _pairs(partners: dict[int, set[int]]) -> set[tuple[int, int]]:
    """Returns pairs of neighbours that contain every atom once.

    Raises:
        ValueError: Not all atoms can be paired.
    """
    remaining = {atom: set(ends) for atom, ends in partners.items()}
    pairs: set[tuple[int, int]] = set()
    # The atom with the fewest choices goes first, which finds all pairs of nearly every molecule.
    while remaining:
        atom = min(remaining, key=lambda number: (len(remaining[number]), number))
        if not remaining[atom]:
            break
        end = min(remaining[atom], key=lambda number: (len(remaining[number]), number))
        pairs.add((atom, end))
        for done in (atom, end):
            for neighbour in remaining.pop(done):
                if neighbour in remaining:
                    remaining[neighbour].discard(done)
    if remaining:
        graph = nx.Graph(
            [(atom, end) for atom, ends in partners.items() for end in ends]
        )
        pairs = nx.max_weight_matching(graph, maxcardinality=True)
    if 2 * len(pairs) < len(partners):
        raise ValueError(
            "single and double bonds cannot alternate between its aromatic atoms; the hydrogen of "
            "an aromatic nitrogen is written as [nH]"
        )
    return pairs


def ring_bonds(neighbours: list[list[int]]) -> set[tuple[int, int]]:
    """Returns the bonds that are in a ring, the smaller number first.

    A bond is in a ring if its ends are still connected without it. In a depth-first search
    (Tarjan 1974), that is where the atoms behind a bond have a bond back to it or further.
    """
    visits: dict[int, int] = {}
    earliest: dict[int, int] = {}
    bonds: set[tuple[int, int]] = set()
    for start in range(len(neighbours)):
        if start in visits:
            continue
        visits[start] = earliest[start] = len(visits)
        # Atoms on the path from the start, each with its remaining neighbours.
        path = [(start, -1, iter(neighbours[start]))]
        while path:
            atom, previous, ends = path[-1]
            end = next(ends, None)
            if end is None:
                path.pop()
                if previous >= 0:
                    earliest[previous] = min(earliest[previous], earliest[atom])
                    if earliest[atom] <= visits[previous]:
                        bonds.add((min(atom, previous), max(atom, previous)))
            elif end not in visits:
                visits[end] = earliest[end] = len(visits)
                path.append((end, atom, iter(neighbours[end])))
            elif end != previous:
                earliest[atom] = min(earliest[atom], visits[end])
                bonds.add((min(atom, end), max(atom, end)))
    return bonds
