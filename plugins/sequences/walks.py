"""Molecules as tokens: walks that take every bond, and the way back (Zhao et al. 2024, GraphGPT).

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

PAD, END, JUMP = 0, 1, 2
_BONDS = (SINGLE, DOUBLE, TRIPLE, AROMATIC)
_FIRST_BOND = 3
_FIRST_NUMBER, NUMBERS = _FIRST_BOND + len(_BONDS), 64
"""Atoms of a molecule, at most."""
_FIRST_ATOM = _FIRST_NUMBER + NUMBERS
_ATOMS = tuple(
    Atom(element, aromatic, charge)
    for aromatic, charge, elements in (
        (False, 0, "C N O Cl S F Br P I B Si Se As Hg H"),
        (True, 0, "C N O S P B Se As"),
        (False, 1, "N O S P H Li Na K C"),
        (False, -1, "O N S C Cl Br I F B"),
        (True, 1, "N O S"),
        (True, -1, "N C"),
        (False, 2, "S Mg Ca Zn"),
    )
    for element in elements.split()
)
_ATOM_TOKENS = {atom: _FIRST_ATOM + place for place, atom in enumerate(_ATOMS)}
assert _FIRST_ATOM + len(_ATOMS) == VOCABULARY


def check(molecule: Molecule) -> None:
    """Raises an error if walks through a molecule do not fit the tokens.

    Raises:
        ValueError: it has too many atoms or bonds, or an atom without a token.
    """
    atoms, bonds = molecule
    if len(atoms) > NUMBERS:
        raise ValueError(f"{len(atoms)} atoms are more than the {NUMBERS} that can be numbered")
    for atom in atoms:
        if atom not in _ATOM_TOKENS:
            raise ValueError(f"no token for {_name(atom)}")
    if 5 * len(atoms) + 4 * len(bonds) > LONGEST:  # with every bond twice; walks are shorter, and all equally long
        encode(molecule, random.Random(0))


def encode(molecule: Molecule, draw: random.Random) -> list[int]:
    """Returns a walk through a molecule that ``check`` has accepted, with a random
    start and random turns.

    Raises:
        ValueError: it is too long.
    """
    tokens = [JUMP]  # cut off in the end: nothing is before the first atom
    first, numbers = draw.randrange(NUMBERS), dict[int, int]()

    def visit(atom: int) -> None:
        known = atom in numbers
        tokens.append(_FIRST_NUMBER + (first + numbers.setdefault(atom, len(numbers))) % NUMBERS)
        if not known:
            tokens.append(_ATOM_TOKENS[molecule.atoms[atom]])

    for walk in _walks(molecule, draw):
        visit(walk[0])
        for one, other in pairwise(walk):
            tokens.append(_FIRST_BOND + _BONDS.index(molecule.bonds[min(one, other), max(one, other)]))
            visit(other)
        tokens.append(JUMP)
    if len(tokens) - 1 > LONGEST:
        raise ValueError(f"its walk has {len(tokens) - 1} tokens, more than {LONGEST}")
    return [*tokens[1:-1], END]


def decode(tokens: Sequence[int]) -> Molecule:
    """The molecule of a walk; its atoms are numbered in the order of their first visit.

    Raises:
        ValueError: This is not a walk; the message contains the place.
    """
    atoms: list[Atom] = []
    bonds: dict[tuple[int, int], int] = {}
    last, kind, first = None, JUMP, tokens[0] if tokens else END
    place = 0
    try:
        while True:
            atom = (tokens[place] - first) % NUMBERS
            if not _FIRST_NUMBER <= tokens[place] < _FIRST_ATOM or atom > len(atoms):
                raise ValueError(f"{tokens[place]} at {place} is not the number of an atom")
            if atom == len(atoms):
                place += 1
                if not _FIRST_ATOM <= tokens[place] < VOCABULARY:
                    raise ValueError(f"{tokens[place]} at {place} describes no atom")
                atoms.append(_ATOMS[tokens[place] - _FIRST_ATOM])
            if kind != JUMP and last is not None:
                pair = (min(last, atom), max(last, atom))
                if last == atom or bonds.setdefault(pair, _BONDS[kind - _FIRST_BOND]) != _BONDS[kind - _FIRST_BOND]:
                    raise ValueError(f"{kind} before {place} cannot be a bond of these atoms")
            last, kind = atom, tokens[place + 1]
            if kind == END:
                return Molecule(atoms, dict(sorted(bonds.items())))
            if not JUMP <= kind < _FIRST_NUMBER:
                raise ValueError(f"{kind} at {place + 1} is neither a bond nor a jump nor the end")
            place += 2
    except IndexError:
        raise ValueError("the walk has no end") from None


def _name(atom: Atom) -> str:
    return f"{'aromatic ' * atom.aromatic}{atom.element}" + (f" with charge {atom.charge:+d}" if atom.charge else "")


def _walks(molecule: Molecule, draw: random.Random) -> Iterator[list[int]]:
    """Yields for every component the atoms of a walk over every bond."""
    order = list(range(len(molecule.atoms)))
    draw.shuffle(order)
    neighbours = molecule.neighbours()
    seen: set[int] = set()
    for start in order:  # at any atom, and on to any neighbour: in the order in which the graph is made
        if start in seen:
            continue
        component: nx.Graph[int] = nx.Graph()
        reached = [start]
        component.add_node(start)
        for atom in reached:
            draw.shuffle(neighbours[atom])
            reached += [other for other in neighbours[atom] if other not in component]
            component.add_edges_from((atom, other) for other in neighbours[atom])
        seen.update(reached)
        whole = _eulerized(component)
        ends = [atom for atom in reached if whole.degree(atom) % 2]
        begin = draw.choice(ends) if ends else start
        steps = nx.eulerian_path(whole, source=begin) if ends else nx.eulerian_circuit(whole, source=begin)
        yield [begin, *(other for _, other in steps)]


def _eulerized(component: nx.Graph[int]) -> nx.MultiGraph[int]:
    """A component with as few bonds twice as a closed walk needs; an open one, between two odd atoms, needs none.

    As ``networkx.eulerize``, but that prefers near pairs of odd atoms to a short walk, whose length then varies.
    """
    odd = [atom for atom in component if component.degree(atom) % 2]
    whole: nx.MultiGraph[int] = nx.MultiGraph(component)
    if len(odd) <= 2:
        return whole
    paths = {atom: nx.single_source_shortest_path(component, atom) for atom in odd}
    pairs: nx.Graph[int] = nx.Graph()
    for place, one in enumerate(odd):
        pairs.add_weighted_edges_from((one, other, len(paths[one][other])) for other in odd[:place])
    for one, other in nx.min_weight_matching(pairs):
        whole.add_edges_from(pairwise(paths[one][other]))
    return whole
