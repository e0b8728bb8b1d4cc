"""The objective of a learner that declares none: the loss on held-out data."""

import json
import math
from pathlib import Path

import pytest
from toy_runs import Notes

import runner
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.loader import load
from runner.tracking.mlflow_view import view_of
from runner.training import checkpoint
from runner.training.loop import Loop
from runner.training.pipeline import assemble
from runner.training.signals import Stop
from runner.verify.statistical import statistical
from runner.verify.training_pool import Milestone, TrainingOrder

PLUGIN = Path(__file__).parents[1] / "default_objectives.py"
RECIPE = """
name: line
device: cpu
model: {kind: line}
data: {kind: points}
optimizer: {kind: sgd, lr: 0.1}
train: {updates: 12, batch_size: 8, evaluate_every: 4}
tracking: {system_metrics: false}
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "line.yaml"
    path.write_text(RECIPE)
    return path


def loaded(path, *sets):
    return load(path, [*sets], Registry([PLUGIN]))


def trained(path, folder, *sets):
    """Trains without a store, and returns the scores of the checkpoints with the evaluations."""
    notes = Notes()
    Loop(assemble(loaded(path, *sets), [PLUGIN]), folder, notes, notes, Stop()).run()
    scores = [checkpoint.read_manifest(saved)["score"] for saved in checkpoint.checkpoints(folder / "checkpoints")]
    return scores, {name: dict(points) for name, points in notes.points.items()}


def test_a_run_without_a_declared_objective_has_a_best_checkpoint_and_a_sorted_table(recipe_file, migrated_workspace):
    result = runner.train(recipe_file, plugins=[PLUGIN])
    assert result.best.metric == "eval/loss"
    assert result.best.value == pytest.approx(result.metrics["eval/loss"])
    view = json.loads(view_of(loaded(recipe_file)))
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`eval/loss`", True)


def test_the_lowest_loss_is_the_best(recipe_file, tmp_path):
    scores, points = trained(recipe_file, tmp_path / "run", "optimizer.lr=1.5", "train.evaluate_every=1")
    losses = points["eval/loss"].values()
    assert max(score for score in scores if score is not None) == -min(losses)
    assert min(losses) < list(losses)[-1]


def test_metrics_beside_the_loss_change_nothing(recipe_file, tmp_path):
    scores, points = trained(recipe_file, tmp_path / "run", "model.measures=loss and error")
    assert scores[-1] == -points["eval/loss"][12]


@pytest.mark.parametrize("measures", ["error", "no number"])
def test_a_loss_that_is_not_measured_stops_nothing(measures, recipe_file, tmp_path):
    scores, points = trained(recipe_file, tmp_path / "run", f"model.measures={measures}")
    assert set(scores) == {None}
    assert len(points["eval/loss" if measures == "no number" else "eval/error"]) == 3


@pytest.mark.parametrize(("kind", "name"), [("line", "loss"), ("judged_line", "error"), ("annealed_line", None)])
def test_a_declaration_goes_first_and_a_loss_that_changes_is_no_objective(kind, name, recipe_file):
    objective = loaded(recipe_file, f"model.kind={kind}").objective
    assert (None if objective is None else objective.name) == name


@pytest.mark.parametrize("after", [{"error": 1.0}, {"loss": math.nan}, {"loss": math.inf}])
def test_trainings_are_not_judged_by_what_they_do_not_measure(after, recipe_file):
    class Measured:
        seconds_left = math.inf

        def run(self, trainings, seeds, length):
            return [Milestone(length, {"loss": 2.0}, after, 2, 1) for _ in trainings for _ in seeds]

    order = TrainingOrder({"seed": 1, "name": "line", "train": {}})
    verdict = statistical(order, order, 12, loaded(recipe_file).objective, Measured(), 8)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.summary.startswith("eval/loss is not measured")
