import csv
import random
from collections import defaultdict

import pytest
import rdkit_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import spelled

from runner.plugins.molecules.scaffold import ACYCLIC, scaffold, scaffold_atoms
from runner.plugins.molecules.smiles import read

MOLECULES = [text for text in (rdkit_graphs.FOLDER / "molecules.smi").read_text().split() if "[c]" not in text]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MOLECULES), st.randoms(use_true_random=False))
def test_a_scaffold_does_not_depend_on_the_spelling(text, generator):
    assert scaffold(read(spelled(text, generator))) == scaffold(read(text))


@pytest.mark.parametrize(
    "texts",
    [
        ("c1ccccc1", "C1=CC=CC=C1", "CCc1ccc(O)cc1", "OC(=O)c1ccccc1", "[Na+].[O-]c1ccccc1"),
        ("c1ccccc1CCc1ccccc1", "C(c1ccccc1)C(C)c1ccccc1Cl"),
        ("O=C1CCCCC1", "O=C1CCCC(CC#N)C1"),
        ("CC(=O)O", "C", "[Na+].[Cl-]", "C=CC(C)C"),
    ],
)
def test_side_chains_are_no_part_of_a_scaffold(texts):
    assert len({scaffold(read(text)) for text in texts}) == 1


def test_different_rings_and_linkers_are_different_scaffolds():
    texts = [
        "C", "c1ccccc1", "C1CCCCC1", "c1ccncc1", "c1cc[n+](C)cc1", "O=C1CCCCC1", "C1CCCCC1C1CCCCC1",
        "C1CCCCC1CC1CCCCC1",
        # Labels of neighbours alone do not distinguish these two.
        "C1CCC2CCCCC2C1", "C1CCCC1C1CCCC1",
    ]  # fmt: skip
    assert len({scaffold(read(text)) for text in texts}) == len(texts)
    assert scaffold(read("CCO")) == ACYCLIC


def test_the_atoms_of_a_scaffold():
    assert scaffold_atoms(read("CC1CC1CC(=O)C1CC1")) == {1, 2, 3, 4, 5, 6, 7, 8, 9}
    assert scaffold_atoms(read("CCO")) == set()


@pytest.mark.parametrize(("name", "tautomers"), [("esol.csv", 2), ("freesolv.csv", 0)])
def test_scaffolds_of_published_molecules_are_those_of_rdkit(name, tautomers, published):
    pytest.importorskip("rdkit")
    from rdkit.Chem import MolFromSmiles
    from rdkit.Chem.Scaffolds.MurckoScaffold import GetScaffoldForMol, MurckoScaffoldSmiles

    groups, rdkit_groups = defaultdict(set), defaultdict(set)
    with published(name).open(newline="") as file:
        texts = [row["smiles"].strip() for row in csv.DictReader(file)]
    for row, text in enumerate(texts):
        molecule = read(text)
        assert len(scaffold_atoms(molecule)) == GetScaffoldForMol(MolFromSmiles(text)).GetNumAtoms()
        groups[scaffold(molecule)].add(row)
        rdkit_groups[MurckoScaffoldSmiles(text)].add(row)
    # RDKit distinguishes the two positions of a hydrogen in a purine.
    different = [rows for rows in groups.values() if rows not in rdkit_groups.values()]
    assert sum(map(len, different)) == tautomers


def test_published_molecules_have_one_scaffold_in_any_spelling(published):
    pytest.importorskip("rdkit")
    generator = random.Random(0)
    with published("esol.csv").open(newline="") as file:
        texts = [row["smiles"].strip() for row in csv.DictReader(file)]
    for text in texts[::10]:
        assert len({scaffold(read(spelling)) for spelling in rdkit_graphs.spellings(text, generator)}) == 1
