"""Molecules as graphs, from tables of SMILES, for every family that learns from them."""
