"""Synthetic measurements of small molecules."""

from __future__ import annotations

from itertools import product

HEADS = (
    "C",
    "CC",
    "CC(C)",
    "OC",
    "NC",
    "ClCC",
    "N#CC",
    "CCCCC",
    "C1CCCC1",
    "C1CCCCC1",
    "c1ccccc1",
)
MIDDLES = ("C", "CC", "CO", "CN", "C(=O)", "C(C)C", "CCCC", "c1ccc(cc1)")
TAILS = ("C", "O", "N", "F", "CC", "CO", "C#N", "CCl", "C1CC1")
SHARES = {"C": -0.5, "c": -0.4, "O": 0.8, "N": 0.6, "F": -0.2, "Cl": -0.7}
"""Contributions of atoms to the property."""


def synthetic_molecules() -> dict[str, float]:
    """Returns a property by molecule in SMILES: the sum of its atoms' contributions."""
    molecules = map("".join, product(HEADS, MIDDLES, TAILS))
    return {molecule: _property(molecule) for molecule in molecules}


def _property(molecule: str) -> float:
    chlorine = molecule.count("Cl")
    counts = {atom: molecule.count(atom) for atom in SHARES} | {
        "C": molecule.count("C") - chlorine
    }
    return sum(share * counts[atom] for atom, share in SHARES.items())
