"""One recipe with several seeds, from the command line to MLflow."""

import random
import signal

import mlflow
import pytest
from children import start
from interrupted import kill_when
from running import forked, result_of
from toy_runs import written

from runner.tracking import RunFolder, Workspace
from runner.tracking.seeds import groups
from runner.tracking.store import Store
from runner.tracking.trash import remove

pytestmark = pytest.mark.usefixtures("migrated_workspace")
LENGTH = ("train.epochs=4", "train.evaluate_every=1", "train.checkpoint_every=1")
RARELY = ("--set", "train.evaluate_every=15", "--set", "train.log_every=100")
"""Long enough to be killed, with few evaluations."""


def of_seeds(folder, *more, epochs=4):
    return [*written(folder, *LENGTH, f"train.epochs={epochs}"), "--seeds", "3", *more]


def when_the_second_is_on_its_way():
    """Waits in the toy's own time: the first run has ended, another has a checkpoint."""
    begun = [*Workspace().runs.glob("*/checkpoints")]
    return len(begun) > 1 and all([*folder.glob("step-*")] for folder in begun)


def test_every_seed_is_the_run_that_it_is_alone_and_the_mean_has_an_interval(tmp_path):
    data = result_of(forked(*of_seeds(tmp_path, "--parallel", "2")))
    alone = result_of(forked(*written(tmp_path, *LENGTH, "seed=6")))
    assert data["status"] == "FINISHED"
    assert data["runs"].keys() == {"5", "6", "7"}
    values, mean = data["values"]["loss"], data["means"]["loss"]
    assert values["6"] == alone["metrics"]["eval/loss"]
    assert mean["mean"] == pytest.approx(sum(values.values()) / 3)
    assert mean["low"] < min(values.values()) < max(values.values()) < mean["high"]
    client = mlflow.MlflowClient(alone["tracking_uri"])
    parent = client.get_run(data["run_id"])
    below = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{data['run_id']}'")
    assert {run.info.run_name for run in below} == set(data["runs"].values())
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["eval/loss"] == pytest.approx(mean["mean"])
    assert parent.data.params["seeds"] == "[5, 6, 7]"
    assert parent.data.tags["kind"] == "seeds"
    assert data["name"].rpartition("-")[2] == parent.info.run_id[:8]
    told = parent.data.tags["mlflow.note.content"]
    assert f"* **result**: FINISHED; eval/loss {mean['mean']:.4g} [" in told
    assert "continue it" not in told
    assert [each.path for each in client.list_artifacts(data["run_id"])] == ["curves.png"]
    assert data["name"] == f"toy-seeds-{data['run_id'][:8]}" == parent.info.run_name
    (group,) = groups(Workspace())
    assert (group.status, group.step, group.metrics["eval_low/loss"]) == ("FINISHED", 3, mean["low"])
    removals = remove(Workspace(), [RunFolder(Workspace().seeds / data["name"])], purge=True)
    assert [len(each.run_ids) for each in removals] == [1, 1, 1, 1]
    assert [run.info.run_name for run in client.search_runs([parent.info.experiment_id])] == [alone["run_name"]]


def test_killed_and_given_again_it_goes_on_and_comes_to_the_same(tmp_path):
    kill_when(tmp_path, of_seeds(tmp_path, *RARELY, epochs=30), when_the_second_is_on_its_way, random.Random(0))
    begun = {path.name for path in Workspace().runs.iterdir()}
    data = result_of(forked(*of_seeds(tmp_path, *RARELY, "--resume", epochs=30)))
    assert begun < set(data["runs"].values())
    assert len(groups(Workspace())) == 1
    whole = result_of(forked(*of_seeds(tmp_path, *RARELY, epochs=30)))
    assert data["values"] == whole["values"]
    compared = result_of(forked("compare", data["name"], whole["name"].rpartition("-")[2], "--json"))
    assert compared["groups"] == [data["name"], whole["name"]]
    assert compared["paired"]
    assert compared["metrics"]["loss"]["difference"] == {"mean": 0, "low": 0, "high": 0}


def test_told_to_end_it_leaves_what_can_be_gone_on_with_and_says_how(tmp_path):
    command = [part for part in of_seeds(tmp_path, epochs=1000) if part != "--json"]
    child = start(tmp_path, *command)
    while child.running and not [*Workspace().runs.glob("*/checkpoints/step-*")]:
        pass
    child.send(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM, child.stderr
    assert "STOPPED" in child.stdout
    assert "--seeds 3 --parallel 1 --resume --plugin" in child.stdout.replace(" \\\n", " ")
    (group,) = groups(Workspace())
    assert (group.status, group.step, group.goal) == ("STOPPED", 0, 3)
    parent = Store(Workspace()).client.get_run(group.run_id)
    assert (parent.info.status, parent.data.params["seeds"]) == ("KILLED", "[5, 6, 7]")
    assert "* **continue it**: `runner run " in parent.data.tags["mlflow.note.content"]


def test_one_that_fails_stops_none_of_the_others(tmp_path):
    """The seed is a setting of this learner's, which one of three values does not suit."""
    child = forked(*of_seeds(tmp_path, "--set", "model={kind: toy_unlucky, seed: 6}"))
    assert child.returncode == 1, child.stderr
    assert '"6": ' in child.stdout
    assert len([*Workspace().runs.iterdir()]) == 3
