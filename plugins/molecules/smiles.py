"""Molecules as they are written in SMILES (Weininger 1988), read as graphs of their heavy atoms."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple, cast

import networkx as nx

SINGLE = 1
DOUBLE = 2
TRIPLE = 3
AROMATIC = 4
"""Kinds of bonds."""
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
        """Returns the atoms that are in a ring.

        A bond is in a ring if its ends are still connected without it.
        """
        graph = nx.Graph(list(self.bonds))
        bridges = {
            (min(pair), max(pair))
            for pair in cast("Iterator[tuple[int, int]]", nx.bridges(graph))
        }
        return {atom for bond in self.bonds if bond not in bridges for atom in bond}


def read(text: str) -> Molecule:
    """Reads a molecule; stereochemistry, isotopes, and hydrogens of heavy atoms are ignored.

    Raises:
        ValueError: It cannot be read; the message contains the place and the reason.
    """
    atoms: list[Atom] = []
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
    return _without_hydrogens(Molecule(atoms, dict(sorted(bonds.items()))))


def _atom(text: str, in_brackets: bool) -> Atom:
    if not in_brackets:
        return Atom(text.capitalize(), text.islower(), 0)
    match = _BRACKET.match(text)
    if match is None:
        raise ValueError(f"'[{text}]' is not an atom")
    # A charge is a sign with a number (+2), or as many signs (++).
    signs = match["charge"] or ""
    number = signs.strip("+-")
    charge = int(number) if number else len(signs)
    if signs.startswith("-"):
        charge = -charge
    return Atom(match["atom"].capitalize(), match["atom"].islower(), charge)


def _without_hydrogens(molecule: Molecule) -> Molecule:
    atoms, bonds = molecule
    neighbours = molecule.neighbours()
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
    pairs = {
        (number[start], number[end]): order
        for (start, end), order in bonds.items()
        if {start, end} <= number.keys()
    }
    return Molecule([atoms[index] for index in remaining], pairs)


def skeleton(molecule: Molecule) -> str:
    """Returns a digest of elements and bonds that does not depend on the order of the text;
    different molecules may share it.

    Weisfeiler and Leman 1968: every atom takes in the labels of its neighbours, as often as there
    are atoms at most.
    """
    neighbours = molecule.neighbours()
    labels = [atom.element for atom in molecule.atoms]
    # After as many rounds as atoms, every label contains the entire molecule.
    for _ in range(min(len(labels), _ROUNDS)):
        joined = [
            # Sorted, because the order of the bonds depends on the text.
            "".join(
                [labels[atom], *sorted(labels[neighbour] for neighbour in adjacent)]
            )
            for atom, adjacent in enumerate(neighbours)
        ]
        labels = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in joined]
    return hashlib.sha256("".join(sorted(labels)).encode()).hexdigest()
