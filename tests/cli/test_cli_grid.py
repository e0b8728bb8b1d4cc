"""``runner run`` with several values of settings: one group, a table, and its continuation."""

import io

import mlflow
import pytest
from running import forked
from toy_runs import written
from typer.testing import CliRunner

from runner.cli import app
from runner.cli.grid import Grid, show
from runner.plugin.contract import Objective
from runner.system.console import Console
from runner.system.errors import ExitCode, UsageError
from runner.tracking import Workspace
from runner.tracking.listing import listing
from runner.training.seeds import SeedsResult

LOSS = Objective("loss", "minimize")


def invoked(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_grid_is_one_group_with_a_table(tmp_path, migrated_workspace):
    words = written(tmp_path, "train.updates=2")
    words.remove("--json")
    result = forked(*words, "optimizer.lr=0.01,0.1", "model.dropout=0.0", "--parallel", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("FINISHED, 2 runs")
    assert "optimizer.lr" in result.stdout

    runs = {run["name"]: run for run in listing(Workspace())}
    (group,) = (run for run in runs.values() if run["kind"] == "grid")
    members = [run for run in runs.values() if run["kind"] == "run"]
    assert {run["group"] for run in members} == {group["name"]}
    assert sorted(run["overrides"]["optimizer.lr"] for run in members) == ["0.01", "0.1"]
    assert "optimizer.lr" not in group["overrides"]
    assert group["overrides"]["model.dropout"] == "0.0"
    assert group["metrics"]["eval/loss"] == min(run["metrics"]["eval/loss"] for run in members)

    client = mlflow.MlflowClient(Workspace().resolved_uri(group["tracking_uri"]))
    for member in members:
        assert client.get_run(member["run_id"]).data.tags["mlflow.parentRunId"] == group["run_id"]
    parent = client.get_run(group["run_id"])
    assert parent.data.tags["kind"] == "grid"
    assert "optimizer.lr" not in parent.data.params
    assert group["name"] in invoked("ls", "--kind", "grid").stdout
    assert group["name"] in invoked("show", group["name"]).stdout


def test_the_result_has_a_line_for_every_combination():
    values = {"loss": {1: 0.5, 2: 0.25}, "accuracy": {1: 0.9}}
    result = SeedsResult(
        "toy-grid", "FAILED", "id", "/folder", {1: "toy-1"}, values, {}, {2: "no"}, 1.0, ExitCode.DIVERGED
    )
    grid = Grid(result, {1: {"optimizer.lr": 0.1}, 2: {"optimizer.lr": 0.2}})
    assert grid.rows(["accuracy"]) == [
        {"optimizer.lr": 0.1, "accuracy": 0.9, "loss": 0.5, "run": "toy-1"},
        {"optimizer.lr": 0.2, "accuracy": None, "loss": 0.25, "run": None},
    ]
    data = grid.data()
    assert "means" not in data
    assert data["settings"][2] == {"optimizer.lr": 0.2}
    screen = io.StringIO()
    show(grid, ["accuracy"], LOSS, "runner run toy --resume", Console(file=screen, width=80))
    assert "best loss at the end: 0.25 with optimizer.lr=0.2" in screen.getvalue()
    assert "run 2: no" in screen.getvalue()
    assert screen.getvalue().endswith("next: runner run toy --resume\n")


@pytest.mark.parametrize(
    ("values", "direction", "best"),
    [
        ({1: 0.5, 2: 0.25}, "minimize", 2),
        ({1: 0.5, 2: 0.25}, "maximize", 1),
        ({1: 0.5, 2: 0.5}, "maximize", None),
        ({1: 0.5}, "maximize", None),
        ({1: float("nan"), 2: 0.25, 3: 0.5}, "minimize", 2),
        ({1: float("nan"), 2: 0.25}, "maximize", 2),
        ({1: float("nan"), 2: float("inf")}, "minimize", None),
    ],
)
def test_the_best_run_is_named_where_it_is_clear(values, direction, best):
    result = SeedsResult("toy-grid", "FINISHED", "id", "/folder", {}, {"loss": values}, {}, {}, 1.0, ExitCode.DONE)
    grid = Grid(result, {number: {"optimizer.lr": 0.1} for number in values})
    assert grid.best(Objective("loss", direction)) == best
    assert grid.best(None) is None


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_run_is_one_that_has_finished(direction):
    values = {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    result = SeedsResult(
        "toy-grid", "FAILED", "id", "/folder", {}, {"loss": values}, {}, {}, 1.0, ExitCode.DIVERGED, unfinished=(1, 4)
    )
    grid = Grid(result, {number: {"optimizer.lr": number} for number in values})
    assert grid.best(Objective("loss", direction)) == (2 if direction == "minimize" else 3)


@pytest.mark.parametrize(
    ("sets", "settings"),
    [
        (["seed=2,3"], ["seed=2", "seed=3"]),
        (["data.folds.count=3", "data.folds.index=1,2"], ["data.folds.index=1", "data.folds.index=2"]),
    ],
)
def test_values_of_a_seed_or_a_fold_are_a_grid_like_any_other(sets, settings, tmp_path, migrated_workspace):
    words = written(tmp_path, "train.updates=2")
    words.remove("--json")
    result = forked(*words, *sets)
    assert result.returncode == 0, result.stderr
    runs = listing(Workspace())
    assert [run["kind"] for run in runs if run["kind"] != "run"] == ["grid"]
    overrides = {f"{name}={value}" for run in runs for name, value in run["overrides"].items() if run["kind"] == "run"}
    assert set(settings) <= overrides
    assert "mean" not in result.stdout


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["optimizer.lr=0.1,0.2", "--seeds", "2"],
            "--seeds: optimizer.lr has several values; write seed=0,1,2 instead",
        ),
        (["optimizer.lr=0.1,1e-1"], "runs 1 and 2 of the grid are the same: optimizer.lr=0.1"),
        (["optimizer.lr=0.1,x"], "optimizer.lr: should be a number, got 'x'"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_trained(sets, message, tmp_path, migrated_workspace):
    words = [*written(tmp_path, "train.updates=2"), *sets]
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert message in str(caught.value)
    assert listing(Workspace()) == []
