"""One process and several: a PASS for correct processes, a FAIL for incorrect ones."""

import pytest
from process_pairs import PLUGINS, follow, mechanism, started_pair, tiny_recipe
from running import tiny

from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.verify.process_pair import close_stages, compare_processes, verify_processes

UPDATES = 3


@pytest.fixture(scope="module")
def pair():
    with started_pair() as pair:
        yield pair


def compared(pair, recipe, files=(), used="DataParallel"):
    """Returns the verdict on two processes."""
    stages = close_stages(recipe, 2)
    pair.start(follow, recipe.values(masked=False), files, stages, used)
    with mechanism(used):
        verdict = compare_processes(recipe, Registry(files), stages, pair.group, UPDATES)
    assert pair.wait() == (None,)
    return verdict


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("digits_classifier", ()),
        ("shakespeare_gpt", ("model.dropout=0.1",)),
        ("gps_esol", ("model.dropout=0.2",)),
        ("marl_phase2", ()),
    ],
)
def test_recipes_that_ship_train_the_same_model_on_two_processes(pair, name, sets):
    verdict = compared(pair, tiny(name, *sets))
    assert verdict, verdict
    assert verdict.contract == "Close"
    assert "the same algebra" in verdict.summary


def test_an_incorrect_weight_of_parts_that_processes_draw_fails(pair):
    verdict = compared(pair, tiny("marl_baseline", "train.batch_size=5"), (), "MeanOfParts")
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "not the same algebra" in verdict.summary


def test_a_learner_with_several_optimizers_passes(pair):
    verdict = compared(pair, tiny_recipe("gan"), PLUGINS)
    assert verdict, verdict


def test_a_loss_that_couples_samples_fails(pair):
    """The recipe is refused because its model declares that; this is what would happen without the declaration."""
    verdict = compared(pair, tiny("pgt_cora"))
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "'loss.mean' differs" in verdict.summary


def test_the_report_names_the_processes_and_the_stages(pair):
    recipe = tiny_recipe("tokens", "optimization.gradient_accumulation={micro_batch: 2}")
    pair.start(follow, recipe.values(masked=False), PLUGINS, close_stages(recipe, 2))
    report = verify_processes(recipe, Registry(PLUGINS), pair.group, UPDATES)
    assert pair.wait() == (None,)
    (row,) = report.rows
    assert (row.name, row.contract, row.verdict) == ("2 processes", "Close", Outcome.PASS), row
    assert row.stages == ("gradient_accumulation",)
    # Three updates, two late ones, and one with a sample less.
    assert row.summary.endswith("; errors more frequent than 1 update in 2 are ruled out (95 %)")
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("used", "sets"),
    [
        ("MeanOfMeans", ()),
        ("EarlyClipping", ("optimizer.max_grad_norm=0.05",)),
        ("RepeatedSamples", ()),
    ],
)
def test_an_incorrect_implementation_fails(pair, used, sets):
    verdict = compared(pair, tiny_recipe("tokens", *sets), PLUGINS, used)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert "not the same algebra" in verdict.summary
