"""Slots that stages change are compared for inputs of other shapes."""

from pathlib import Path

import pytest
from judging import judge, pair_of
from running import tiny

from runner.plugin.contract import Exact
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.system.tensor_trees import tensors
from runner.verify.checks.slot_shapes import SlotShapesCheck
from runner.verify.evaluation_checks import same_answers
from runner.verify.slot_calls import record_slot_calls, slot_calls

pytestmark = pytest.mark.usefixtures("short_texts")
HERE = Path(__file__).parent
REGISTRY = Registry([HERE / "remainders.py"])
SETS = (
    "data.synthetic=true",
    "model.layers=1",
    "model.width=8",
    "model.heads=2",
    "data.context=16",
    "optimization.amp=off",
    "optimization.fused_optimizer=off",
)
HARMS = ("zeros", "repeated", "flipped", "scaled")
VARIANTS = [
    (block, HARMS[(row + column) % len(HARMS)], mode)
    for row, block in enumerate((2, 4, 8, 16))
    for column, mode in enumerate(("always", "training", "predicting"))
]
"""Every length of a block with every mode, and every harm with every mode."""


def recipe_of(**options):
    settings = ", ".join(f"{name}: {value}" for name, value in options.items())
    setting = f"optimization.remainders={{{settings}}}" if options else "optimization.remainders=on"
    return tiny("shakespeare_gpt", *SETS, setting, registry=REGISTRY)


@pytest.fixture(scope="module")
def calls():
    """The calls of the check, which all variants share."""
    updates = []

    def note(baseline, candidate, asked, contract):
        updates.extend(asked)
        return same_answers(baseline, candidate, asked, contract)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.verify.checks.slot_shapes.same_answers", note)
        pair, coverage = pair_of(recipe_of(), "remainders", REGISTRY)
        assert SlotShapesCheck().applies(pair)
        assert SlotShapesCheck().run(pair, coverage)
    return pair, updates


@pytest.mark.parametrize(("block", "harm", "mode"), VARIANTS)
def test_an_incomplete_block_that_is_wrong_fails(calls, block, harm, mode):
    pair, updates = calls
    recipe = recipe_of(block=block, harm=harm, mode=mode)
    baseline = slot_calls(pair.recipe, REGISTRY, ())
    candidate = slot_calls(recipe, REGISTRY, ("remainders",))
    verdict = same_answers(baseline, candidate, updates, Exact())
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "'forward" in verdict.summary


def test_inputs_have_several_lengths(calls):
    _, updates = calls
    lengths = {(update.batch.inputs[0].shape[1], update.batch.predicts) for update in updates}
    assert len(lengths) >= 3
    assert {predicts for _, predicts in lengths} == {False, True}
    assert all(length != 16 for length, _ in lengths)


@pytest.mark.parametrize(
    ("name", "kind", "sets"),
    [
        ("mamba2_shakespeare", "chunked_scan", ("data.synthetic=true", "optimization.chunked_scan={chunk: 8}")),
        ("graf_memory", "ray_chunks", ()),
        ("marl_phase1", "merged_critic_loss", ()),
    ],
)
def test_correct_stages_pass(name, kind, sets):
    pair, coverage = pair_of(tiny(name, *sets), kind, Registry())
    check = SlotShapesCheck()
    assert not check.applies(pair) or check.run(pair, coverage)


def test_a_remainder_of_rays_that_no_recipe_has_fails():
    registry = Registry([HERE / "wrong_views.py"])
    verdict = judge(SlotShapesCheck(), "rays_in_complete_chunks", registry)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "'render_rays' differs" in verdict.summary


def test_a_stage_that_changes_no_slot_of_the_learner_is_not_compared():
    recipe = tiny("digits_classifier", "optimization.fused_optimizer=on")
    pair, _ = pair_of(recipe, "fused_optimizer", Registry())
    assert not SlotShapesCheck().applies(pair)


def test_calls_with_objects_of_a_pipeline_are_left_out():
    recipe = tiny("digits_classifier")
    calls = record_slot_calls(recipe, Registry(), recipe.model.slots)
    # A loss receives the progress, too.
    assert [call.slot for call in calls] == ["conv", "forward"]
    found = list(tensors([call.inputs for call in calls]))
    assert found
    assert not any(tensor.requires_grad for tensor in found)
