"""Some ways in which a wrong stage may stay unseen, and one for each that does not."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import wrong_base
from judging import SHORT, judge, recipe_of
from torch import nn

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.system.errors import UsageError
from runner.verify.checks.resumed_training import ResumedTrainingCheck
from runner.verify.checks.sampled_batches import SampledBatchesCheck
from runner.verify.checks.trained_model import TrainedModelCheck
from runner.verify.checks.updates import UpdatesCheck
from runner.verify.gate import verify_recipe

pytestmark = pytest.mark.usefixtures("short_texts")
HERE = Path(wrong_base.__file__).parent
PATCHES = HERE / "wrong_import.py"  # importing it is what is wrong with it
FILES = [file for file in sorted(HERE.glob("wrong_*.py")) if file not in (PATCHES, Path(wrong_base.__file__))]
REGISTRY = Registry(FILES)
FOUND = [
    ("autocast_left_on", "exact", UpdatesCheck, r"update 1, slot 'forward': 'output' differs"),
    ("unaveraged", "exact", UpdatesCheck, r"update 1, slot 'step': 'predict' differs"),
    ("when_loss_rises", "close", UpdatesCheck, r"update 2, slot 'step': 'model\.stem\.0\.weight\.grad' differs"),
    ("loss_buffer", "exact", UpdatesCheck, r"update 1, slot 'step': 'loss\.sum' is overwritten by a later update"),
    (
        "rates_of_the_beginning",
        "close",
        UpdatesCheck,
        r"update 2, slot 'forward': 'learner\.optimizers\.model\.param_groups\.0\.lr'",
    ),
    (
        "ready_on_arrival",
        "close",
        SampledBatchesCheck,
        r"the result of an update is not the same: update 1, slot 'step': 'output\.loss\.mean'",
    ),
    (
        "staged_over",
        "exact",
        SampledBatchesCheck,
        r"the sample is not the same: update 2, slot 'next_batch': 'batch\.image'",
    ),
    (
        "first_order_again",
        "exact",
        ResumedTrainingCheck,
        r"a resumed training is another one: update 1, slot 'step': 'batch\.image'",
    ),
    (
        "dimmed",
        "close",
        SampledBatchesCheck,
        r"the sample is not the same: update 1, slot 'next_batch': 'batch\.image'",
    ),
    ("unwanted_decay", "close", UpdatesCheck, r"update 1, slot 'step': 'predict' differs"),
    ("decoded_by_name", "exact", UpdatesCheck, r"slot 'next_batch': 'image' differs"),
    ("tokens_by_shape", "exact", UpdatesCheck, r"update 2, slot 'step': 'predict.grasp' differs"),
]
"""Stages, what they promise, and the check that finds each, with the place."""


@pytest.mark.parametrize(("kind", "promise", "check", "where"), FOUND)
def test_a_wrong_stage_fails_with_the_slot_and_the_tensor(kind, promise, check, where):
    verdict = judge(check(), kind, REGISTRY, promise, SHORT)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert re.search(where, verdict.summary), verdict.summary


def test_weights_that_are_packed_again_at_each_prediction_fail():
    verdict = judge(TrainedModelCheck(), "packed_until_asked", REGISTRY, "close")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "of the trained model and what is restored of it, " in verdict.summary


def verified(kind):
    """Returns the only row of the report on a stage."""
    options = replace(SHORT, stages=(kind,))
    (row,) = verify_recipe(recipe_of(kind, REGISTRY), REGISTRY, options, lambda _: None).rows
    return row


@pytest.mark.usefixtures("changed_process")
def test_what_reaches_the_baseline_fails_with_what_it_changes_there(monkeypatch):
    monkeypatch.setattr(nn.LayerNorm, "forward", nn.LayerNorm.forward)  # put back afterwards
    row = verified("epsilon_for_all")
    assert row.verdict == "FAIL"
    assert re.search(r"the change reaches the baseline, too: update 1, slot 'step': '\w+_loss'", row.summary)


def test_a_stage_whose_slot_nobody_calls_is_inactive_and_does_not_pass():
    with pytest.raises(UsageError, match="uncalled_unscale: the learner never calls its slot 'unscale'"):
        verified("uncalled_unscale")


def test_there_are_stages_for_every_hole_and_family():
    holes = Counter(case.hole for case in wrong_base.CASES.values())
    families = Counter(wrong_base.family_of(case.recipe) for case in wrong_base.CASES.values())
    assert holes.keys() == wrong_base.HOLES.keys()
    assert families.keys() == wrong_base.FAMILIES.keys()
    assert min(holes.values()) >= 6
    assert min(families.values()) >= 5
    assert {case.recipe for case in wrong_base.CASES.values()} == wrong_base.SETTINGS.keys()
