"""Commands work on the runs of a workspace after it was moved."""

import pytest
from children import start
from toy_runs import TOYS, written

import runner
from runner.tracking import Workspace
from runner.tracking.lookup import folders
from runner.training.model_versions import register

PLACES = ["renamed", "a b", "50%_off", "über/.runner"]
PLUGIN = ("--plugin", str(TOYS))
LENGTH = ("train.updates=12", "train.evaluate_every=2", "train.checkpoint_every=2")


def killed_after(checkpoints):
    """The variable that kills a run after it has removed superseded checkpoints that many times."""
    return {"RUNNER_FAULTS": f"checkpoint.pruned=kill@{checkpoints}"}


def test_runs_of_a_moved_workspace_are_evaluated_loaded_and_resumed(tmp_path, migrated_workspace, monkeypatch):
    words = written(tmp_path, *LENGTH)
    assert start(tmp_path, *words, **killed_after(1)).wait() < 0
    (killed,) = (folder.name for folder in folders(Workspace().runs))
    finished = runner.train(tmp_path / "toy.yaml", {"train.updates": 4}, plugins=[TOYS])
    version = register(finished.run_name, "toys")
    answers = []
    place = migrated_workspace
    for name in PLACES:
        moved = tmp_path / name
        moved.parent.mkdir(exist_ok=True)
        place.rename(moved)
        monkeypatch.setenv("RUNNER_WORKSPACE", str(moved))
        evaluated = start(tmp_path, "evaluate", finished.run_name, "--json", *PLUGIN).data()
        assert evaluated["metrics"]["loss"] == pytest.approx(finished.metrics["eval/loss"])
        for reference in (finished.run_name, finished.run_id, f"{version.name}/{version.number}"):
            learner = runner.load_model(reference, plugins=[TOYS])
            answers.append(learner.module[0].weight.tolist())
        again = ("resume", killed, "--quiet", "--json", *PLUGIN)
        if name != PLACES[-1]:
            assert start(tmp_path, *again, **killed_after(1)).wait() < 0
        else:
            assert start(tmp_path, *again).data()["status"] == "FINISHED"
        assert not place.exists()
        place = moved
    assert all(answer == answers[0] for answer in answers)
