"""Some ways in which a wrong stage may stay unseen, and one for each that does not."""

import re
from collections import Counter
from pathlib import Path

import pytest
import wrong_base
from running import RECIPES
from torch import nn

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import UsageError
from runner.verify.gate import verify_recipe
from runner.verify.options import Options

HERE = Path(wrong_base.__file__).parent
PATCHES = HERE / "wrong_import.py"  # importing it is what is wrong with it
FILES = [file for file in sorted(HERE.glob("wrong_*.py")) if file not in (PATCHES, Path(wrong_base.__file__))]
REGISTRY = Registry(FILES)
UPDATES = 3
SYNTHETIC = {"shakespeare_gpt": ("data.synthetic=true",)}
"""Texts of which no test may depend on a download."""
FOUND = [
    ("autocast_left_on", "exact", r"update 1, slot 'forward': 'output' differs"),
    ("unaveraged", "exact", r"update 1, slot 'step': 'predict' differs"),
    ("when_loss_rises", "close", r"update 2, slot 'step': 'model\.stem\.0\.weight\.grad' differs"),
    ("loss_buffer", "exact", r"update 1, slot 'step': 'loss\.sum' is overwritten by a later update"),
    ("rates_of_the_beginning", "close", r"update 2, slot 'forward': 'learner\.optimizers\.model\.param_groups\.0\.lr'"),
    (
        "ready_on_arrival",
        "close",
        r"the result of an update is not the same: update 1, slot 'step': 'output\.loss\.mean'",
    ),
    ("staged_over", "exact", r"the sample is not the same: update 2, slot 'next_batch': 'batch\.image'"),
    ("first_order_again", "exact", r"a resumed training is another one: update 1, slot 'step': 'batch\.image'"),
    ("dimmed", "close", r"the sample is not the same: update 1, slot 'next_batch': 'batch\.image'"),
    ("unwanted_decay", "close", r"update 1, slot 'step': 'predict' differs"),
    ("decoded_by_name", "exact", r"slot 'next_batch': 'image' differs"),
    ("tokens_by_shape", "exact", r"update 2, slot 'step': 'predict.grasp' differs"),
]
"""Stages, what they promise, and where each is found out."""


def judged(kind, promise, horizon=0):
    """The report on one stage of the recipe that it is made for."""
    case = wrong_base.CASES[kind]
    sets = [
        *wrong_base.settings_of(case.recipe),
        *case.sets,
        *SYNTHETIC.get(case.recipe, ()),
        "device=cpu",
        f"optimization.{kind}.promise={promise}",
    ]
    recipe = load(RECIPES / f"{wrong_base.shipped_recipe(case.recipe)}.yaml", sets, REGISTRY)
    return verify_recipe(
        recipe,
        REGISTRY,
        Options(UPDATES, budget=0.0, stages=(kind,), horizon=horizon, names_operators=False),
        lambda _: None,
    )


@pytest.mark.parametrize(("kind", "promise", "where"), FOUND)
def test_a_wrong_stage_fails_with_the_slot_and_the_tensor(kind, promise, where):
    (row,) = judged(kind, promise).rows
    assert row.verdict == "FAIL"
    assert re.search(where, row.summary), row.summary


def test_weights_that_are_packed_again_at_each_prediction_fail():
    (row,) = judged("packed_until_asked", "close", horizon=20).rows
    assert row.verdict == "FAIL"
    assert "of the trained model and what is restored of it, " in row.summary


@pytest.mark.usefixtures("changed_process")
def test_what_reaches_the_baseline_fails_with_what_it_changes_there(monkeypatch):
    monkeypatch.setattr(nn.LayerNorm, "forward", nn.LayerNorm.forward)  # put back afterwards
    (row,) = judged("epsilon_for_all", "exact").rows
    assert row.verdict == "FAIL"
    assert re.search(r"the change reaches the baseline, too: update 1, slot 'step': '\w+_loss'", row.summary)


def test_a_stage_whose_slot_nobody_calls_is_inactive_and_does_not_pass():
    with pytest.raises(UsageError, match="uncalled_unscale: the learner never calls its slot 'unscale'"):
        judged("uncalled_unscale", "exact")


def test_there_are_stages_for_every_hole_and_family():
    holes = Counter(case.hole for case in wrong_base.CASES.values())
    families = Counter(wrong_base.family_of(case.recipe) for case in wrong_base.CASES.values())
    assert holes.keys() == wrong_base.HOLES.keys()
    assert families.keys() == wrong_base.FAMILIES.keys()
    assert min(holes.values()) >= 6
    assert min(families.values()) >= 5
    assert {case.recipe for case in wrong_base.CASES.values()} == wrong_base.SETTINGS.keys()
