"""Writes how RDKit reads the molecules of molecules.smi, each in several spellings, to rdkit_graphs.json.

Run it as ``python tests/molecules/rdkit_graphs.py`` when a molecule is added.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
EXPECTED = FOLDER / "rdkit_graphs.json"
KINDS = {"SINGLE": "-", "DOUBLE": "=", "TRIPLE": "#", "AROMATIC": ":"}


def graph_of(molecule):
    """Returns atoms (lower case if aromatic) with hydrogens and charge, and bonds, as a line of text."""
    atoms = []
    for atom in molecule.GetAtoms():
        symbol = atom.GetSymbol().lower() if atom.GetIsAromatic() else atom.GetSymbol()
        charge = atom.GetFormalCharge()
        atoms.append(f"{symbol}{atom.GetTotalNumHs()}" + (f"{charge:+d}" if charge else ""))
    bonds = []
    for bond in molecule.GetBonds():
        start, end = sorted((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()))
        bonds.append((start, end, KINDS[str(bond.GetBondType())]))
    return " ".join(atoms) + " | " + " ".join(f"{start}{kind}{end}" for start, end, kind in sorted(bonds))


def spellings(text, generator):
    """Yields a molecule as given, then from another atom: aromatic, as a Kekulé form, and with neutral nitro groups."""
    from rdkit import Chem

    yield text
    molecule = Chem.MolFromSmiles(text)
    for kekule in (False, True):
        order = list(range(molecule.GetNumAtoms()))
        generator.shuffle(order)
        renumbered = Chem.RenumberAtoms(molecule, order)
        if kekule:
            Chem.Kekulize(renumbered, clearAromaticFlags=True)
        written = Chem.MolToSmiles(renumbered, canonical=False, kekuleSmiles=kekule)
        yield written
        neutral = written.replace("[N+](=O)[O-]", "N(=O)=O")
        if neutral != written:
            yield neutral


def main():
    from rdkit import Chem

    generator = random.Random(0)
    graphs = {}
    for molecule in (FOLDER / "molecules.smi").read_text().split():
        for text in spellings(molecule, generator):
            graphs[text] = graph_of(Chem.MolFromSmiles(text))
    EXPECTED.write_text(json.dumps(graphs, indent=0) + "\n")


if __name__ == "__main__":
    main()
