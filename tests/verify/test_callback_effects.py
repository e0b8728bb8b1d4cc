"""``verify`` compares trainings with and without each callback."""

from pathlib import Path

import pytest
from toy_runs import TOYS, written

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.system.errors import ExitCode, UsageError
from runner.verify.explanation import explain
from runner.verify.gate import verify_recipe
from runner.verify.options import Options
from runner.verify.training_pool import training_order

OBSERVERS = Path(__file__).parents[1] / "observers.py"
REGISTRY = Registry([TOYS, OBSERVERS])
OPTIONS = Options(updates=4, budget=0.0, horizon=0, names_operators=False)


def recipe_of(folder, *sets):
    written(folder)
    return load(folder / "toy.yaml", ["train.updates=8", *sets], REGISTRY)


def verified(folder, *sets, options=OPTIONS):
    return verify_recipe(recipe_of(folder, *sets), REGISTRY, options, lambda _: None)


@pytest.mark.parametrize("what", ["in_place", "data", "state", "mode"])
def test_a_callback_that_changes_the_learner_fails(what, tmp_path):
    report = verified(tmp_path, f"callbacks={{meddler: {{what: {what}, at: 2}}, counter: on}}")
    verdicts = {row.name: (row.verdict, row.contract) for row in report.rows}
    assert verdicts == {"callbacks.counter": ("PASS", "Exact"), "callbacks.meddler": ("FAIL", "Exact")}
    assert report.exit_code == ExitCode.GATE_FAILED
    summary = report.rows[1].summary
    assert summary.startswith("callback 'meddler' change")
    assert summary.endswith("; found in 4 updates and an evaluation")


def test_a_callback_that_reads_or_ends_the_training_passes(tmp_path):
    report = verified(tmp_path, "callbacks.counter={ends_in: after_update}")
    assert report.exit_code == ExitCode.DONE
    (row,) = report.rows
    assert row.summary.endswith("the same bits with and without it; it would have ended the training here")


@pytest.mark.usefixtures("few_checks")
def test_stages_are_judged_beside_callbacks(tmp_path):
    sets = ("callbacks.counter=on", "optimization.fused_optimizer=on")
    report = verified(tmp_path, *sets)
    assert [row.name for row in report.rows] == ["fused_optimizer", "all", "callbacks.counter"]
    only = verified(tmp_path, *sets, options=Options(updates=4, budget=0.0, horizon=0, stages=("fused_optimizer",)))
    assert [row.name for row in only.rows] == ["fused_optimizer"]


def test_trainings_of_stages_have_no_callbacks(tmp_path):
    order = training_order(recipe_of(tmp_path, "callbacks.counter=on"), REGISTRY, (), 8)
    assert "callbacks" not in order.recipe


def test_it_is_explained(tmp_path):
    explanation = explain(recipe_of(tmp_path, "callbacks.counter=on"), REGISTRY, OPTIONS)
    assert explanation.sets == {"callbacks.counter": "Exact"}
    assert explanation.checks[-1].costs == {"Exact": "2 x (4 updates and an evaluation), all together"}
    with pytest.raises(UsageError, match="has no stage to verify; switch one on"):
        explain(recipe_of(tmp_path), REGISTRY, OPTIONS)
