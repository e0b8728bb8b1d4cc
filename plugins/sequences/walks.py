"""Molecules as tokens: walks over every bond, and back again (Zhao et al. 2024, GraphGPT).

A walk starts with an atom; every step is a bond, or a jump to the next component, and the atom at
its end. Atoms are named by numbers in the order of their first visit, from a random one on, and
described at their first visit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx

from ..molecules.smiles import AROMATIC, DOUBLE, SINGLE, TRIPLE, Atom, Molecule
from .graph_config import LONGEST, VOCABULARY

PAD = 0
END = 1
JUMP = 2
_BONDS = (SINGLE, DOUBLE, TRIPLE, AROMATIC)
_FIRST_BOND = 3
_FIRST_NUMBER = _FIRST_BOND + len(_BONDS)
NUMBERS = 64
"""Largest number of atoms in a molecule."""
_FIRST_ATOM = _FIRST_NUMBER + NUMBERS
_ELEMENTS = (
    (False, 0, "C N O Cl S F Br P I B Si Se As Hg H"),
    (True, 0, "C N O S P B Se As"),
    (False, 1, "N O S P H Li Na K C"),
    (False, -1, "O N S C Cl Br I F B"),
    (True, 1, "N O S"),
    (True, -1, "N C"),
    (False, 2, "S Mg Ca Zn"),
)
"""Elements that have a token, by aromaticity and charge."""
_ATOMS = tuple(
    Atom(element, aromatic, charge)
    for aromatic, charge, elements in _ELEMENTS
    for element in elements.split()
)
_ATOM_TOKENS = {atom: token for token, atom in enumerate(_ATOMS, _FIRST_ATOM)}
assert _FIRST_ATOM + len(_ATOMS) == VOCABULARY


def check(molecule: Molecule) -> None:
    """Raises an error if walks through a molecule do not fit the tokens.

    Raises:
        ValueError: it has too many atoms or bonds, or an atom without a token.
    """
    atoms, bonds = molecule
    if len(atoms) > NUMBERS:
        raise ValueError(
            f"{len(atoms)} atoms are more than the {NUMBERS} that can be numbered"
        )
    for atom in atoms:
        if atom not in _ATOM_TOKENS:
            raise ValueError(f"no token for {_name(atom)}")
    # The bound takes every bond twice. Walks are shorter, and all walks of a molecule have the
    # same length, so one of them decides where the bound does not.
    if 5 * len(atoms) + 4 * len(bonds) > LONGEST:
        encode(molecule, random.Random(0))


def encode(molecule: Molecule, generator: random.Random) -> list[int]:
    """Returns a random walk through a molecule that ``check`` has accepted.

    Args:
        molecule: The molecule.
        generator: Selects the first number, the start, and the direction at every atom.

    Raises:
        ValueError: it is too long.
    """
    # A random first number trains all numbers equally, also those that only large molecules need.
    first_number = generator.randrange(NUMBERS)
    numbers: dict[int, int] = {}
    tokens: list[int] = []

    def visit(atom: int) -> None:
        is_new = atom not in numbers
        number = numbers.setdefault(atom, len(numbers))
        tokens.append(_FIRST_NUMBER + (first_number + number) % NUMBERS)
        if is_new:
            tokens.append(_ATOM_TOKENS[molecule.atoms[atom]])

    for walk in _walks(molecule, generator):
        if tokens:
            tokens.append(JUMP)
        visit(walk[0])
        for start, end in pairwise(walk):
            bond = molecule.bonds[min(start, end), max(start, end)]
            tokens.append(_FIRST_BOND + _BONDS.index(bond))
            visit(end)
    tokens.append(END)
    if len(tokens) > LONGEST:
        raise ValueError(
            f"its walk has {len(tokens)} tokens, more than {LONGEST}"
        )
    return tokens


def decode(tokens: Sequence[int]) -> Molecule:
    """Returns the molecule of a walk; its atoms are numbered in the order of their first visit.

    Raises:
        ValueError: This is not a walk; the message contains the position.
    """
    atoms: list[Atom] = []
    bonds: dict[tuple[int, int], int] = {}
    previous_atom = 0
    step = JUMP
    position = 0
    try:
        while step != END:
            atom = _atom_number(tokens, position, len(atoms))
            if atom == len(atoms):
                position += 1
                atoms.append(_atom(tokens[position], position))
            if step != JUMP:
                bond = _BONDS[step - _FIRST_BOND]
                pair = (min(previous_atom, atom), max(previous_atom, atom))
                if (
                    previous_atom == atom
                    or bonds.setdefault(pair, bond) != bond
                ):
                    raise ValueError(
                        f"{step} before {position} cannot be a bond of these atoms"
                    )
            previous_atom = atom
            step = _step(tokens[position + 1], position + 1)
            position += 2
    except IndexError:
        raise ValueError("the walk has no end") from None
    return Molecule(atoms, dict(sorted(bonds.items())))


def _atom_number(tokens: Sequence[int], position: int, count: int) -> int:
    """Returns the number of the atom at a position, if ``count`` atoms have been visited before.

    The first token of a walk is the number of its first atom, from which others are counted.
    """
    token = tokens[position]
    number = (token - tokens[0]) % NUMBERS
    if not _FIRST_NUMBER <= token < _FIRST_ATOM or number > count:
        raise ValueError(f"{token} at {position} is not the number of an atom")
    return number


def _atom(token: int, position: int) -> Atom:
    if not _FIRST_ATOM <= token < VOCABULARY:
        raise ValueError(f"{token} at {position} describes no atom")
    return _ATOMS[token - _FIRST_ATOM]


def _step(token: int, position: int) -> int:
    if not END <= token < _FIRST_NUMBER:
        raise ValueError(
            f"{token} at {position} is neither a bond nor a jump nor the end"
        )
    return token


def _name(atom: Atom) -> str:
    name = f"aromatic {atom.element}" if atom.aromatic else atom.element
    return f"{name} with charge {atom.charge:+d}" if atom.charge else name


def _walks(molecule: Molecule, generator: random.Random) -> Iterator[list[int]]:
    """Yields for every component the atoms of a walk over every bond."""
    starts = list(range(len(molecule.atoms)))
    generator.shuffle(starts)
    neighbours = molecule.neighbours()
    visited: set[int] = set()
    for start in starts:
        if start in visited:
            continue
        component = _component(start, neighbours, generator)
        visited.update(component)

        graph = _eulerized(component)
        odd = [atom for atom in component if graph.degree(atom) % 2]
        if odd:
            first = generator.choice(odd)
            edges = nx.eulerian_path(graph, source=first)
        else:
            first = start
            edges = nx.eulerian_circuit(graph, source=first)
        yield [first, *(end for _, end in edges)]


def _component(
    start: int, neighbours: list[list[int]], generator: random.Random
) -> nx.Graph[int]:
    """Returns the connected component of an atom.

    The order of its nodes and edges is random, because networkx takes the edges of a walk in the
    order in which they were added.
    """
    component: nx.Graph[int] = nx.Graph()
    component.add_node(start)
    queue = [start]
    for atom in queue:
        generator.shuffle(neighbours[atom])
        queue += [end for end in neighbours[atom] if end not in component]
        component.add_edges_from((atom, end) for end in neighbours[atom])
    return component


def _eulerized(component: nx.Graph[int]) -> nx.MultiGraph[int]:
    """Returns a component in which as few bonds are doubled as a closed walk needs.

    An open walk between two odd atoms needs none. In contrast to ``networkx.eulerize``, which
    prefers near pairs of odd atoms, all walks of a molecule have the same, shortest length.
    """
    # A walk enters and leaves an atom with different bonds, so bonds are doubled along paths that
    # join pairs of atoms with an odd number of bonds.
    odd = [atom for atom in component if component.degree(atom) % 2]
    graph: nx.MultiGraph[int] = nx.MultiGraph(component)
    if len(odd) <= 2:
        return graph
    paths = {
        atom: nx.single_source_shortest_path(component, atom) for atom in odd
    }
    pairs: nx.Graph[int] = nx.Graph()
    for index, start in enumerate(odd):
        for end in odd[:index]:
            pairs.add_edge(start, end, weight=len(paths[start][end]))
    for start, end in nx.min_weight_matching(pairs):
        graph.add_edges_from(pairwise(paths[start][end]))
    return graph
