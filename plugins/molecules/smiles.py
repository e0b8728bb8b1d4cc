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
        found: list[list[int]] = [[] for _ in self.atoms]
        for one, other in self.bonds:
            found[one].append(other)
            found[other].append(one)
        return found

    def rings(self) -> set[int]:
        """The atoms that are in a ring: those of a bond without which its ends are connected
        still.
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

    def bond(one: int, other: int, order: int | None) -> None:
        both = atoms[one].aromatic and atoms[other].aromatic
        pair = (min(one, other), max(one, other))
        if one == other or pair in bonds:
            raise ValueError(
                f"a second bond between atoms {pair[0] + 1} and {pair[1] + 1}"
            )
        bonds[pair] = order or (AROMATIC if both else SINGLE)

    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError(
                f"'{text[place]}' at character {place + 1} does not belong in a SMILES"
            )
        kind = str(token.lastgroup)
        found = token[str(token.lastgroup)]
        try:
            if kind in ("atom", "bracket"):
                atoms.append(_atom(found, kind == "bracket"))
                if last is not None:
                    bond(last, len(atoms) - 1, order)
                last = len(atoms) - 1
                order = None
            elif kind == "bond":
                order = _ORDERS[found]
            elif found == "(":
                branches.append(last)
            elif found == ")":
                last = branches.pop()
            elif found == ".":
                last = None
                order = None
            elif last is None:
                raise ValueError("a ring starts without an atom")
            elif found in rings:
                other, before = rings.pop(found)
                bond(other, last, order or before)
                order = None
            else:
                rings[found] = (last, order)
                order = None
        except (ValueError, IndexError) as error:
            problem = (
                "a ')' without its '('" if isinstance(error, IndexError) else str(error)
            )
            raise ValueError(f"{problem}, at character {place + 1}") from error
        place = token.end()
    if rings or branches or not atoms:
        raise ValueError(
            "a ring is not closed"
            if rings
            else "a ')' is missing"
            if branches
            else "no atom"
        )
    return _without_hydrogens(Molecule(atoms, dict(sorted(bonds.items()))))


def _atom(text: str, bracket: bool) -> Atom:
    if not bracket:
        return Atom(text.capitalize(), text.islower(), 0)
    found = _BRACKET.match(text)
    if found is None:
        raise ValueError(f"'[{text}]' is not an atom")
    signs = found["charge"] or ""
    number = signs.strip("+-")
    charge = (int(number) if number else len(signs)) * (
        -1 if signs.startswith("-") else 1
    )
    return Atom(found["atom"].capitalize(), found["atom"].islower(), charge)


def _without_hydrogens(molecule: Molecule) -> Molecule:
    atoms, bonds = molecule
    neighbours = molecule.neighbours()
    kept = [
        place
        for place, atom in enumerate(atoms)
        if atom.element != "H"
        or atom.charge
        or len(neighbours[place]) != 1
        or atoms[neighbours[place][0]].element == "H"
    ]
    number = {old: new for new, old in enumerate(kept)}
    pairs = {
        (number[one], number[other]): order
        for (one, other), order in bonds.items()
        if {one, other} <= number.keys()
    }
    return Molecule([atoms[place] for place in kept], pairs)


def skeleton(molecule: Molecule) -> str:
    """Returns a digest of elements and bonds that does not depend on the order of the text;
    different molecules may share it.

    Weisfeiler and Leman 1968: every atom takes in the labels of its neighbours, as often as there
    are atoms at most.
    """
    neighbours = molecule.neighbours()
    labels = [atom.element for atom in molecule.atoms]
    for _ in range(min(len(labels), _ROUNDS)):
        joined = [
            "".join([labels[atom], *sorted(labels[other] for other in around)])
            for atom, around in enumerate(neighbours)
        ]
        labels = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in joined]
    return hashlib.sha256("".join(sorted(labels)).encode()).hexdigest()
