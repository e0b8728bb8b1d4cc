import csv
import json
import random
import re

import networkx as nx
import pytest
import rdkit_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import SIGNS, spelled

from runner.plugins.molecules.smiles import Atom, Molecule, read, read_structure, skeleton
from runner.plugins.molecules.structure import AROMATIC, DOUBLE, SINGLE

EXPECTED = json.loads(rdkit_graphs.EXPECTED.read_text())
"""By spelling of a molecule, the graph that RDKit reads."""


def described(text):
    """Returns the graph that is read, in the format of ``rdkit_graphs``."""
    molecule, hydrogens = read(text), read_structure(text).hydrogens
    atoms = [
        (atom.element.lower() if atom.aromatic else atom.element)
        + str(count)
        + (f"{atom.charge:+d}" if atom.charge else "")
        for atom, count in zip(molecule.atoms, hydrogens, strict=True)
    ]
    bonds = [f"{start}{SIGNS[kind]}{end}" for (start, end), kind in molecule.bonds.items()]
    return " ".join(atoms) + " | " + " ".join(bonds)


def test_every_spelling_is_read_as_by_rdkit():
    assert len(EXPECTED) > 180
    assert {text: described(text) for text in EXPECTED} == EXPECTED


@pytest.mark.parametrize("name", ["esol.csv", "freesolv.csv"])
def test_published_molecules_are_read_as_by_rdkit_in_any_spelling(name, published):
    chem = pytest.importorskip("rdkit.Chem")
    generator = random.Random(0)
    skeletons = {}
    with published(name).open(newline="") as file:
        texts = [row["smiles"].strip() for row in csv.DictReader(file)]
    for number, text in enumerate(texts):
        spellings = rdkit_graphs.spellings(text, generator) if number % 4 == 0 else [text]
        for spelling in spellings:
            molecule = chem.MolFromSmiles(spelling)
            assert described(spelling) == rdkit_graphs.graph_of(molecule)
            rings = {atom.GetIdx() for atom in molecule.GetAtoms() if atom.IsInRing()}
            assert read(spelling).rings() == rings
            skeletons.setdefault(chem.MolToSmiles(molecule), set()).add(skeleton(read(spelling)))
    assert all(len(digests) == 1 for digests in skeletons.values())


def graph_of(text):
    structure = read_structure(text)
    atoms = zip(structure.elements, structure.charges, structure.hydrogens, structure.aromatic, strict=True)
    graph = nx.Graph([(*pair, {"is": kind}) for pair, kind in structure.bonds.items()])
    graph.add_nodes_from((number, {"is": atom}) for number, atom in enumerate(atoms))
    return graph


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([text for text in EXPECTED if "[c]" not in text]), st.randoms(use_true_random=False))
def test_a_molecule_is_the_same_graph_in_every_spelling(text, generator):
    spelling = spelled(text, generator)
    equal = nx.algorithms.isomorphism.categorical_node_match("is", None)
    assert nx.is_isomorphic(graph_of(text), graph_of(spelling), node_match=equal, edge_match=equal), spelling


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
        ("cC", "atom 1, 'c', is written as aromatic and is in no ring"),
        ("c1cccn1", "the hydrogen of an aromatic nitrogen is written as [nH]"),
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
