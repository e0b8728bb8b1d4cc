"""``runner run`` with several values of settings: one group, a table, and its continuation."""

import json

import mlflow
import pytest
from toy_runs import TOYS, written
from typer.testing import CliRunner

from runner.cli import app
from runner.tracking import Workspace
from runner.tracking.listing import listing


def invoked(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.usefixtures("copied_children")
def test_a_grid_is_one_group_with_a_table(tmp_path, migrated_workspace):
    words = written(tmp_path, "train.updates=2")
    words.remove("--json")
    grid = [*words, "optimizer.lr=0.01,0.1", "model.dropout=0.0", "--parallel", "2"]
    result = invoked(*grid)
    assert result.exit_code == 0, result.output
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

    continued = json.loads(invoked(*grid, "--resume", "--json").stdout)
    assert continued["settings"] == {"1": {"optimizer.lr": 0.01}, "2": {"optimizer.lr": 0.1}} or continued["name"]
    assert len(listing(Workspace())) == 6


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["optimizer.lr=0.1,0.2", "--seeds", "2"], "--seeds: optimizer.lr has several values; write seed=0,1,2 instead"),
        (["optimizer.lr=0.1,1e-1"], "runs 1 and 2 of the grid are the same: optimizer.lr=0.1"),
        (["optimizer.lr=0.1,x"], "optimizer.lr: should be a number, got 'x'"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_trained(sets, message, tmp_path, migrated_workspace):
    result = invoked(*written(tmp_path, "train.updates=2"), *sets)
    assert result.exit_code == 2
    assert message in result.output
    assert listing(Workspace()) == []
    assert TOYS.exists()
