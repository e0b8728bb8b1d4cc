"""Which part of the data a recipe uses, in words."""

import pytest
from running import RECIPES
from toy_runs import toy

from runner.plugin.registry import Registry
from runner.recipe.limited_data import describe_limits
from runner.recipe.loader import load


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ((), None),
        (("data.limit={train: 1}",), None),
        (("data.limit={train: 0.1}",), "10 % of the training data"),
        (("data.limit={held_out: 0.125}",), "12.5 % of the held-out data"),
        (("train.overfit_batches=1",), "the same batch in all updates"),
        (
            ("data.limit={train: 0.001, held_out: 0.5}", "train.overfit_batches=3"),
            "0.1 % of the training data, 50 % of the held-out data, the same 3 batches in all updates",
        ),
    ],
)
def test_all_limits_are_described(sets, words, tmp_path):
    assert describe_limits(toy(tmp_path, "train.updates=1", *sets)) == words


def test_a_simulator_has_no_limits():
    assert describe_limits(load(RECIPES / "marl_baseline.yaml", (), Registry())) is None
