"""Regression of molecular properties from counts and descriptors of molecules, without a network.

Our descriptors need no further package; those of RDKit are measured if it is installed.
"""

import time
from collections import Counter

import networkx as nx
import numpy as np
from results import TEST, Result
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

from runner.plugin.registry import Registry
from runner.plugins.molecules.smiles import AROMATIC, DOUBLE, SINGLE, TRIPLE, read
from runner.plugins.molecules.table import Table
from runner.recipe.loader import load

TABLES = ("esol.csv", "freesolv.csv")
SPLITS = {"molecule": "", "scaffold": " data.split_by=scaffold"}
"""By what stays together in a split: the setting of the recipes."""
RECIPES = {"esol.csv": "gps_esol, graphgpt_esol", "freesolv.csv": "gps_esol data.file=freesolv.csv"}
VALENCES = {"B": 3, "C": 4, "N": 3, "O": 2, "P": 3, "S": 2}
"""Usual valences, from which hydrogens follow; other elements have none."""
MASSES = {
    "H": 1.008, "B": 10.81, "C": 12.011, "N": 14.007, "O": 15.999, "F": 18.998, "Si": 28.085, "P": 30.974,
    "S": 32.06, "Cl": 35.45, "Se": 78.97, "Br": 79.904, "I": 126.904,
}  # fmt: skip
USUAL_MASS = 50.0
"""Mass of an element that is not among them."""
ORDERS = {SINGLE: 1.0, DOUBLE: 2.0, TRIPLE: 3.0, AROMATIC: 1.5}
POLAR_AREAS = {("N", 0): 12.0, ("N", 1): 12.0, ("N", 2): 26.0, ("O", 0): 13.0, ("O", 1): 20.2}
"""Parts of a polar surface in square angstroms, by element and hydrogens (rounded, after Ertl et al. 2000)."""
BOOSTING = {
    "n_estimators": 500,
    "learning_rate": 0.05,
    "max_depth": 4,
    "subsample": 0.7,
    "min_samples_leaf": 3,
    "max_features": 0.5,
}


def models(seed):
    """Returns the regressions by name; their settings are the same for all tables and features."""
    return {
        "ridge regression": make_pipeline(StandardScaler(), Ridge(1.0)),
        "SVR": make_pipeline(StandardScaler(), SVR(C=10, epsilon=0.05)),
        "gradient boosting": GradientBoostingRegressor(random_state=seed, **BOOSTING),
    }


def counts(molecule):
    """Returns how often atoms and bonds of every kind occur."""
    numbers = Counter()
    for atom in molecule.atoms:
        numbers[f"{atom.element} {'aromatic ' if atom.aromatic else ''}{atom.charge}"] += 1
    for order in molecule.bonds.values():
        numbers[f"bond {order}"] += 1
    return numbers


def descriptors(molecule):
    """Returns counts, hydrogens, rings, mass, a polar surface, rotatable bonds and shape."""
    atoms, bonds = molecule.atoms, molecule.bonds
    graph = nx.Graph()
    graph.add_nodes_from(range(len(atoms)))
    graph.add_edges_from(bonds)
    in_ring = molecule.rings()
    valence = np.zeros(len(atoms))
    for pair, order in bonds.items():
        valence[list(pair)] += ORDERS[order]
    hydrogens = [
        max(0, round(VALENCES.get(atom.element, 0) + atom.charge - np.floor(valence[index])))
        for index, atom in enumerate(atoms)
    ]
    donors = sum(1 for index, atom in enumerate(atoms) if atom.element in "NO" and hydrogens[index])
    rotatable = [
        pair
        for pair, order in bonds.items()
        if order == SINGLE and not set(pair) <= in_ring and min(graph.degree(atom) for atom in pair) > 1
    ]
    polar = sum(POLAR_AREAS.get((atom.element, hydrogens[index]), 0.0) for index, atom in enumerate(atoms))
    mass = sum(MASSES.get(atom.element, USUAL_MASS) for atom in atoms) + sum(hydrogens) * MASSES["H"]
    degrees = Counter(min(degree, 4) for _, degree in graph.degree())
    rings = len(bonds) - len(atoms) + nx.number_connected_components(graph)
    numbers = counts(molecule)
    numbers.update({f"degree {degree}": number for degree, number in degrees.items()})
    # What a carbon is bonded to decides whether it likes water.
    for start, end in bonds:
        names = sorted(f"{atoms[atom].element}{hydrogens[atom]}" for atom in (start, end))
        numbers["-".join(names)] += 1
    aromatic = sum(atom.aromatic for atom in atoms)
    largest = max(nx.connected_components(graph), key=len)
    numbers.update(
        {
            "hydrogens": sum(hydrogens), "donors": donors, "acceptors": sum(atom.element in "NO" for atom in atoms),
            "rotatable": len(rotatable), "polar": polar, "mass": mass, "rings": rings, "in rings": len(in_ring),
            "aromatic share": aromatic / len(atoms), "atoms": len(atoms), "polar share": polar / mass,
            "diameter": nx.diameter(graph.subgraph(largest)),
        }
    )  # fmt: skip
    return numbers


def counted(table):
    """Returns counts for all molecules of a table."""
    return matrix([counts(read(text)) for text in table.smiles])


def described(table):
    """Returns own descriptors for all molecules of a table."""
    return matrix([descriptors(read(text)) for text in table.smiles])


def described_by_rdkit(table):
    """Returns counts and nine descriptors of RDKit."""
    from rdkit import Chem, RDLogger
    from rdkit.Chem import Crippen, Descriptors, rdMolDescriptors

    RDLogger.DisableLog("rdApp.*")
    functions = (
        Crippen.MolLogP, Crippen.MolMR, Descriptors.MolWt, rdMolDescriptors.CalcTPSA, rdMolDescriptors.CalcNumHBD,
        rdMolDescriptors.CalcNumHBA, rdMolDescriptors.CalcNumRotatableBonds, rdMolDescriptors.CalcNumRings,
        rdMolDescriptors.CalcFractionCSP3,
    )  # fmt: skip
    molecules = [Chem.MolFromSmiles(text) for text in table.smiles]
    return np.hstack([counted(table), [[function(molecule) for function in functions] for molecule in molecules]])


FEATURES = {
    "counts": counted,
    "descriptors": described,
    "counts and 9 descriptors of RDKit": described_by_rdkit,
}


def matrix(rows):
    """Returns a column for each name that occurs."""
    names = sorted({name for row in rows for name in row})
    return np.array([[row.get(name, 0) for name in names] for row in rows], dtype=float)


def measure(seeds):
    """Returns the RMSE on the test part of every split."""
    for split, setting in SPLITS.items():
        for name in TABLES:
            yield from results_of(seeds, name, split, RECIPES[name] + setting)


def results_of(seeds, name, split, recipes):
    """Returns the results for a table that is split in one way."""
    values = {}
    seconds = {}
    for seed in seeds:
        sets = ["device=cpu", f"seed={seed}", f"data.file={name}", f"data.split_by={split}", *TEST]
        table = Table(load("gps_esol", sets, Registry()).data, seed)
        targets = np.array(table.targets)
        for features, function in FEATURES.items():
            try:
                inputs = function(table)
            except ModuleNotFoundError:
                continue
            for model_name, model in models(seed).items():
                started = time.perf_counter()
                model.fit(inputs[table.train], targets[table.train])
                error = model.predict(inputs[table.held_out]) - targets[table.held_out]
                label = f"{model_name}, {features}"
                values.setdefault(label, {})[seed] = float(np.sqrt(np.mean(error**2)))
                seconds[label] = time.perf_counter() - started
    for label, by_seed in values.items():
        yield Result(recipes, label, "rmse", by_seed, seconds[label])
