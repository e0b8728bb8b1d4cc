"""Scaffolds of molecules (Bemis and Murcko 1996, J. Med. Chem. 39, 2887): rings, and the linkers
between them.
"""

from __future__ import annotations

from collections import defaultdict

import networkx as nx

from .rings import relevant_rings
from .smiles import DOUBLE, Molecule, refined_digest
from .structure import ring_bonds

ACYCLIC = ""
"""The scaffold of all molecules without rings."""


def scaffold(molecule: Molecule) -> str:
    """Returns a digest of a molecule's scaffold that does not depend on the order of the text.

    As in RDKit, the scaffold contains the atoms with a double bond to a ring or to a linker, such
    as the oxygen of a ketone. All other side chains are removed, and so are hydrogens: tautomers
    of a ring share a scaffold. Different scaffolds may share a digest; equal ones never differ.
    """
    atoms = scaffold_atoms(molecule)
    if not atoms:
        return ACYCLIC
    neighbours = molecule.neighbours()
    ring_sizes: dict[int, list[int]] = defaultdict(list)
    for ring in relevant_rings(ring_bonds(neighbours)):
        for atom in ring.atoms:
            ring_sizes[atom].append(len(ring.atoms))

    number = {atom: index for index, atom in enumerate(sorted(atoms))}
    labels = []
    for atom in number:
        element, aromatic, charge = molecule.atoms[atom]
        # Without the sizes of rings, labels of neighbours do not distinguish two rings with a
        # common bond from two smaller ones with a bond between them.
        labels.append(f"{element}{int(aromatic)}{charge:+d}{sorted(ring_sizes[atom])}")
    bonds: list[list[tuple[int, str]]] = [[] for _ in labels]
    for (start, end), kind in molecule.bonds.items():
        if start in number and end in number:
            bonds[number[start]].append((number[end], str(kind)))
            bonds[number[end]].append((number[start], str(kind)))
    return refined_digest(labels, bonds)


def scaffold_atoms(molecule: Molecule) -> set[int]:
    """Returns the numbers of the atoms of a molecule's scaffold; none without rings."""
    # Without its ends, again and again, a graph is its rings and what connects them.
    core = set(nx.k_core(nx.Graph(list(molecule.bonds)), 2))
    double_bonds = [pair for pair, kind in molecule.bonds.items() if kind == DOUBLE]
    outer = {atom for pair in double_bonds if core & set(pair) for atom in pair}
    return core | outer
