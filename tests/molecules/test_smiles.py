import csv
import random
import re

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.molecules.smiles import AROMATIC, DOUBLE, SINGLE, Atom, Molecule, read, skeleton

CHARGED_OTHERWISE = {"esol.csv": 59, "freesolv.csv": 2}
"""Molecules that are written without formal charges (nitro groups as N(=O)=O), which RDKit separates."""


@pytest.mark.parametrize("name", CHARGED_OTHERWISE)
def test_published_molecules_are_those_that_rdkit_reads(name, published):
    chem = pytest.importorskip("rdkit.Chem")
    charges = 0
    groups = {}
    with published(name).open(newline="") as file:
        found = [row["smiles"].strip() for row in csv.DictReader(file)]
    for text in found:
        ours, theirs = read(text), chem.MolFromSmiles(text)
        assert [atom.element for atom in ours.atoms] == [atom.GetSymbol() for atom in theirs.GetAtoms()]
        pairs = {tuple(sorted((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()))) for bond in theirs.GetBonds()}
        assert set(ours.bonds) == pairs
        assert ours.rings() == {atom.GetIdx() for atom in theirs.GetAtoms() if atom.IsInRing()}
        charges += [atom.charge for atom in ours.atoms] != [atom.GetFormalCharge() for atom in theirs.GetAtoms()]
        groups.setdefault(chem.MolToSmiles(theirs), set()).add(skeleton(ours))
    assert charges == CHARGED_OTHERWISE[name]
    assert all(len(found) == 1 for found in groups.values())  # one molecule, one skeleton


def test_what_smiles_can_say():
    acid = read("CC(=O)O")
    assert acid == Molecule(
        [Atom("C", False, 0)] * 2 + [Atom("O", False, 0)] * 2, {(0, 1): 1, (1, 2): DOUBLE, (1, 3): 1}
    )
    assert set(read("c1ccccc1").bonds.values()) == {AROMATIC}
    assert read("c1ccccc1-c2ccccc2").bonds[5, 6] == SINGLE
    assert read("[NH4+].[Cl-]") == Molecule([Atom("N", False, 1), Atom("Cl", False, -1)], {})
    assert read("[O-2]").atoms[0].charge == -2
    assert read("[13C@@H](F)(Cl)Br").atoms[0] == Atom("C", False, 0)
    assert read("C%10CCCC%10").rings() == set(range(5))
    assert read("[H]OC([H])([H])[H]") == read("OC")
    assert len(read("[H][H]").atoms) == 2
    assert read("C1CC1CC2CC2").rings() == {0, 1, 2, 4, 5, 6}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no atom"),
        ("C1CC", "a ring is not closed"),
        ("CC)C", "a ')' without its '(', at character 3"),
        ("C(C", "a ')' is missing"),
        ("CX", "'X' at character 2 does not belong in a SMILES"),
        ("C[?]", "'[?]' is not an atom, at character 2"),
        ("C11", "a second bond between atoms 1 and 1, at character 3"),
        ("1CC1", "a ring starts without an atom, at character 1"),
    ],
)
def test_what_cannot_be_read_says_where(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        read(text)


@given(st.text(alphabet="CNOclno()[]123=#.+-H%/\\@", max_size=30))
def test_any_text_is_read_or_refused(text):
    try:
        molecule = read(text)
    except ValueError:
        return
    assert all(0 <= one < other < len(molecule.atoms) for one, other in molecule.bonds)


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_a_skeleton_is_the_same_however_atoms_are_numbered(atoms, seed):
    draw = random.Random(seed)
    graph = nx.gnp_random_graph(atoms, 0.4, seed)
    elements = [draw.choice("CNO") for _ in range(atoms)]
    order = draw.sample(range(atoms), atoms)

    def molecule(order):
        place = {old: new for new, old in enumerate(order)}
        bonds = {tuple(sorted((place[a], place[b]))): 1 for a, b in graph.edges}
        return Molecule([Atom(elements[old], False, 0) for old in order], bonds)

    assert skeleton(molecule(range(atoms))) == skeleton(molecule(order))
