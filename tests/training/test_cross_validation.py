"""A cross-validation, from the command line to the file of predictions."""

import random
from pathlib import Path

import mlflow
import pytest
import torch
from children import start
from interrupted import kill_when
from running import forked, result_of
from safetensors.torch import load_file
from scipy.stats import t as student
from toy_runs import written

from runner.tracking import Workspace
from runner.tracking.seeds import groups

pytestmark = pytest.mark.usefixtures("migrated_workspace")
FOLDS = 3
LENGTH = ("train.epochs=4", "train.evaluate_every=1", "train.checkpoint_every=1")
RARELY = ("--set", "train.evaluate_every=15", "--set", "train.log_every=100")
"""Long enough to be killed, with few evaluations."""
SAMPLES = 50


def of_folds(folder, *more, epochs=4, folds=FOLDS):
    return [*written(folder, *LENGTH, f"train.epochs={epochs}"), "--folds", str(folds), *more]


def when_the_second_has_a_checkpoint():
    trained = [*Workspace().runs.glob("*/checkpoints")]
    return len(trained) > 1 and all([*folder.glob("step-*")] for folder in trained)


def test_every_fold_is_a_run_and_every_sample_is_predicted_once(tmp_path):
    data = result_of(forked(*of_folds(tmp_path, "--parallel", "2")))
    assert data["status"] == "FINISHED"
    assert data["name"].startswith("toy-folds-")
    assert data["runs"].keys() == {"0", "1", "2"}
    values, mean = [*data["values"]["loss"].values()], data["means"]["loss"]
    assert mean["mean"] == pytest.approx(sum(values) / FOLDS)
    # Nadeau and Bengio: the variance of the mean is (1 / k + 1 / (k - 1)) times that of a fold.
    width = student.ppf(0.975, FOLDS - 1) * (torch.tensor(values).double().var() * (1 / 3 + 1 / 2)).sqrt()
    assert mean["high"] - mean["mean"] == pytest.approx(float(width))
    table = load_file(data["predictions"])
    assert table["sample"].tolist() == list(range(SAMPLES))
    assert table["fold"].bincount().tolist() == [17, 17, 16]
    assert len(table["prediction"]) == SAMPLES
    assert Path(data["predictions"]).parent == Path(data["folder"])

    alone = result_of(forked(*written(tmp_path, *LENGTH, f"data.folds={{count: {FOLDS}, index: 1}}")))
    assert data["values"]["loss"]["1"] == alone["metrics"]["eval/loss"]

    client = mlflow.MlflowClient(alone["tracking_uri"])
    parent = client.get_run(data["run_id"])
    assert (parent.data.tags["kind"], parent.data.params["folds"]) == ("folds", "[0, 1, 2]")
    artifacts = {artifact.path for artifact in client.list_artifacts(data["run_id"])}
    assert artifacts == {"curves.png", "predictions.safetensors"}
    (group,) = groups(Workspace())
    assert (group.kind, group.status, group.step, group.unit) == ("folds", "FINISHED", FOLDS, "folds")


def test_a_killed_cross_validation_resumes_and_predicts_the_same(tmp_path):
    long = {"epochs": 30, "folds": 2}
    kill_when(tmp_path, of_folds(tmp_path, *RARELY, **long), when_the_second_has_a_checkpoint, random.Random(0))
    resumed = result_of(forked(*of_folds(tmp_path, *RARELY, "--resume", **long)))
    assert len(groups(Workspace())) == 1
    reference = result_of(forked(*of_folds(tmp_path, *RARELY, **long)))
    assert resumed["values"] == reference["values"]
    first, second = (load_file(result["predictions"]) for result in (resumed, reference))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["marl_phase1"], "--folds: 'uav_path_planning' has no samples that could be divided: it needs a dataset"),
        (["gcn_cora", "data.synthetic=true"], "--folds: 'citation_graph' needs all of its samples together"),
        (["digits_classifier", "--seeds", "2"], "--folds: cannot be combined with --seeds"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_trained(tmp_path, words, message):
    child = start(tmp_path, "run", *words, "--folds", "3")
    assert child.wait() == 2
    assert message in " ".join(child.stderr.split())
    assert groups(Workspace()) == []
