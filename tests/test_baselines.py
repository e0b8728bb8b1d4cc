"""Baselines without a network are proper ones, and their table is that of the measurements."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from running import tiny

from runner.plugins.molecules.smiles import read
from runner.plugins.sequences.walks import NUMBERS, encode
from runner.training.pipeline import assemble

FOLDER = Path(__file__).parents[1] / "experiments" / "baselines"
sys.path.insert(0, str(FOLDER))
try:
    import baselines
    import kneser_ney
    import retrieval
    import walks
finally:
    sys.path.remove(str(FOLDER))


def test_the_table_is_that_of_the_measurements():
    """Otherwise: python experiments/baselines/baselines.py --table"""
    results = json.loads((FOLDER / "result.json").read_text())
    assert (FOLDER / "table.md").read_text() == baselines.table(results)
    assert set(results["families"]) == set(baselines.FAMILIES)


@pytest.mark.parametrize("order", [1, 2, 4])
def test_probabilities_of_all_symbols_after_a_context_add_up_to_one(order):
    tokens = np.random.default_rng(0).integers(0, 5, 300) ** 2 % 7
    model = kneser_ney.KneserNey(kneser_ney.windows_of(tokens, order, order - 1), 7)
    contexts = np.array([[6, 5, 3], [0, 1, 4], [1, 1, 1]])[:, 3 - (order - 1) :]
    total = sum(model.probabilities(np.insert(contexts, order - 1, symbol, axis=1)) for symbol in range(7))
    assert total == pytest.approx(np.ones(3))
    assert len(set(model.probabilities(np.array([[*contexts[1], 0], [*contexts[1], 1]])))) == 2


def test_relative_symbols_do_not_depend_on_the_first_number():
    tokens = encode(read("CC(=O)Oc1ccccc1C(=O)O"), random.Random(0))
    first = walks.FIRST_NUMBER
    shifted = [first + (token - first + 9) % NUMBERS if walks.is_number(token) else token for token in tokens]
    assert shifted != tokens
    assert walks.relative(shifted) == walks.relative(tokens)
    other = encode(read("CC(=O)Oc1ccccc1C(=O)O"), random.Random(1))
    assert walks.relative(other) != walks.relative(tokens)


def test_retrieval_takes_the_smallest_trained_cube_that_is_not_smaller():
    source = assemble(tiny("grasp_diffusion")).source
    retrieved = retrieval.Retrieval(source, 0)
    sizes = retrieved.edges.tolist()
    for edge, expected in [(sizes[0], sizes[0]), (0.07875, 0.0825), (0.2, max(sizes))]:
        rows = source.train.rows[sizes.index(pytest.approx(expected))]
        known = source.train.grasps.grasp[rows]
        for grasp in retrieved.grasps_for(edge, 3):
            assert bool((known == grasp).all(1).any())
