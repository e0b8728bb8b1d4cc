"""Molecules in SMILES (Weininger 1988), read as graphs of their heavy atoms.

The graph does not depend on how a molecule is written: bonds may alternate or be aromatic, and a
nitro group has charges or not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from .aromaticity import perceive
from .structure import AROMATIC, DOUBLE, SINGLE, TRIPLE, Structure, complete, ring_bonds

__all__ = [
    "AROMATIC",
    "DOUBLE",
    "SINGLE",
    "TRIPLE",
    "Atom",
    "Molecule",
    "parse",
    "read",
    "read_structure",
    "refined_digest",
    "skeleton",
]

_ROUNDS = 16
"""Rounds of label propagation; more rounds distinguish few further molecules."""
_ORDERS = {
    "-": SINGLE,
    "/": SINGLE,
    "\\": SINGLE,
    "=": DOUBLE,
    "#": TRIPLE,
    ":": AROMATIC,
}
_TOKEN = re.compile(
    r"\[(?P<bracket>[^\]]*)\]|(?P<atom>Cl|Br|[BCNOPSFIbcnops])|(?P<bond>[-=#:/\\])|%(?P<far>\d\d)|(?P<ring>\d)|(?P<other>[().])"
)
_BRACKET = re.compile(
    r"\d*(?P<atom>[A-Z][a-z]?|[a-z][a-z]?)@{0,2}(?P<hydrogens>H\d*)?(?P<charge>\++\d*|-+\d*)?(?::\d+)?$"
)


class Atom(NamedTuple):
    """A heavy atom, or a hydrogen that bonds to no heavy one."""

    element: str
    aromatic: bool
    charge: int


class _WrittenAtom(NamedTuple):
    """An atom as it is written."""

    element: str
    aromatic: bool
    charge: int = 0
    hydrogens: int = 0
    in_brackets: bool = False


class Molecule(NamedTuple):
    """A graph: atoms by number, and each bond once, from the smaller number to the larger."""

    atoms: list[Atom]
    bonds: dict[tuple[int, int], int]

    def neighbours(self) -> list[list[int]]:
        """Returns the neighbours of every atom, in the order of the bonds in the text."""
        adjacent: list[list[int]] = [[] for _ in self.atoms]
        for start, end in self.bonds:
            adjacent[start].append(end)
            adjacent[end].append(start)
        return adjacent

    def rings(self) -> set[int]:
        """Returns the atoms that are in a ring."""
        return {atom for bond in ring_bonds(self.neighbours()) for atom in bond}


def read(text: str) -> Molecule:
    """Reads a molecule; stereochemistry and isotopes are ignored, and hydrogens of heavy atoms are
    left out.

    Raises:
        ValueError: It cannot be read; the message contains the place and the reason.
    """
    structure = read_structure(text)
    columns = (structure.elements, structure.aromatic, structure.charges)
    atoms = [Atom(*values) for values in zip(*columns, strict=True)]
    return Molecule(atoms, structure.bonds)


def read_structure(text: str) -> Structure:
    """Reads a molecule like ``read``, with the number of hydrogens of every atom.

    Raises:
        ValueError: It cannot be read.
    """
    structure = parse(text)
    complete(structure)
    perceive(structure)
    return structure


def parse(text: str) -> Structure:
    """Returns the atoms and bonds as they are written.

    Raises:
        ValueError: The text is not a SMILES; the message contains the place and the reason.
    """
    atoms: list[_WrittenAtom] = []
    bonds: dict[tuple[int, int], int] = {}
    branches: list[int | None] = []
    rings: dict[str, tuple[int, int | None]] = {}
    last: int | None = None
    order: int | None = None

    def bond(start: int, end: int, order: int | None) -> None:
        are_aromatic = atoms[start].aromatic and atoms[end].aromatic
        pair = (min(start, end), max(start, end))
        if start == end or pair in bonds:
            raise ValueError(
                f"a second bond between atoms {pair[0] + 1} and {pair[1] + 1}"
            )
        # SMILES leaves out single bonds, and aromatic ones between aromatic atoms.
        bonds[pair] = order or (AROMATIC if are_aromatic else SINGLE)

    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(
                f"'{text[position]}' at character {position + 1} does not belong in a SMILES"
            )
        kind = str(token.lastgroup)
        symbol = token[kind]
        try:
            if kind in ("atom", "bracket"):
                atoms.append(_atom(symbol, kind == "bracket"))
                if last is not None:
                    bond(last, len(atoms) - 1, order)
                last = len(atoms) - 1
                order = None
            elif kind == "bond":
                order = _ORDERS[symbol]
            elif symbol == "(":
                branches.append(last)
            elif symbol == ")":
                last = branches.pop()
            elif symbol == ".":
                last = None
                order = None
            elif last is None:
                raise ValueError("a ring starts without an atom")
            elif symbol in rings:
                # A digit opens a ring, and the same digit closes it.
                end, opening_order = rings.pop(symbol)
                bond(end, last, order or opening_order)
                order = None
            else:
                rings[symbol] = (last, order)
                order = None
        except (ValueError, IndexError) as error:
            problem = (
                "a ')' without its '('" if isinstance(error, IndexError) else str(error)
            )
            raise ValueError(f"{problem}, at character {position + 1}") from error
        position = token.end()
    if rings:
        raise ValueError("a ring is not closed")
    if branches:
        raise ValueError("a ')' is missing")
    if not atoms:
        raise ValueError("no atom")
    return _without_hydrogens(atoms, bonds)


def _atom(text: str, in_brackets: bool) -> _WrittenAtom:
    if not in_brackets:
        return _WrittenAtom(text.capitalize(), text.islower())
    match = _BRACKET.match(text)
    if match is None:
        raise ValueError(f"'[{text}]' is not an atom")
    # A charge is a sign with a number (+2), or as many signs (++).
    signs = match["charge"] or ""
    number = signs.strip("+-")
    charge = int(number) if number else len(signs)
    if signs.startswith("-"):
        charge = -charge
    hydrogens = int(match["hydrogens"][1:] or 1) if match["hydrogens"] else 0
    element = match["atom"].capitalize()
    return _WrittenAtom(element, match["atom"].islower(), charge, hydrogens, True)


def _without_hydrogens(
    atoms: list[_WrittenAtom], bonds: dict[tuple[int, int], int]
) -> Structure:
    """Returns the structure of the heavy atoms, which count their hydrogens."""
    neighbours: list[list[int]] = [[] for _ in atoms]
    for start, end in bonds:
        neighbours[start].append(end)
        neighbours[end].append(start)
    # Hydrogens follow from the valence of their atoms. Ions and hydrogen molecules are kept,
    # because nothing else would represent them.
    remaining = [
        index
        for index, atom in enumerate(atoms)
        if atom.element != "H"
        or atom.charge
        or len(neighbours[index]) != 1
        or atoms[neighbours[index][0]].element == "H"
    ]
    number = {old: new for new, old in enumerate(remaining)}
    structure = Structure(
        elements=[atoms[index].element for index in remaining],
        charges=[atoms[index].charge for index in remaining],
        aromatic=[atoms[index].aromatic for index in remaining],
        hydrogens=[atoms[index].hydrogens for index in remaining],
        is_complete=[atoms[index].in_brackets for index in remaining],
        bonds={},
        neighbours=[[] for _ in remaining],
    )
    for index, atom in enumerate(remaining):
        for end in neighbours[atom]:
            if end in number:
                structure.neighbours[index].append(number[end])
            else:
                structure.hydrogens[index] += 1
    for (start, end), kind in sorted(bonds.items()):
        if start in number and end in number:
            structure.bonds[number[start], number[end]] = kind
            # The atoms of a written aromatic bond may have upper-case letters.
            if kind == AROMATIC:
                structure.aromatic[number[start]] = True
                structure.aromatic[number[end]] = True
    return structure


def skeleton(molecule: Molecule) -> str:
    """Returns a digest of elements and bonds that does not depend on the order of the text;
    different molecules may share it.
    """
    labels = [atom.element for atom in molecule.atoms]
    # The kinds of bonds are no part of it.
    bonds = [[(end, "") for end in ends] for ends in molecule.neighbours()]
    return refined_digest(labels, bonds)


def refined_digest(
    labels: Sequence[str], bonds: Sequence[Sequence[tuple[int, str]]]
) -> str:
    """Returns a digest of a graph that does not depend on the order of its nodes; different graphs
    may share it.

    Weisfeiler and Leman 1968: every atom takes in the labels of its neighbours, as often as there
    are atoms at most.

    Args:
        labels: The label of every atom.
        bonds: Of every atom, its neighbours with the label of the bond between them.
    """
    # After as many rounds as atoms, every label contains the entire molecule.
    for _ in range(min(len(labels), _ROUNDS)):
        joined = [
            # Sorted, because the order of the bonds depends on the text.
            "".join([label, *sorted(bond + labels[end] for end, bond in ends)])
            for label, ends in zip(labels, bonds, strict=True)
        ]
        labels = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in joined]
    return hashlib.sha256("".join(sorted(labels)).encode()).hexdigest()
