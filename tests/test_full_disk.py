"""A disk that is full or fails: one clear message, the true status, and the older checkpoint loads."""

import json
import shutil
import signal

import pytest
from children import start
from disks import fill, free, small_disk
from interrupted import arguments
from outages import PACING, points, records, rows, training

from runner.system.faults import POINTS
from runner.training import checkpoint

ACTIONS = ("enospc", "raise")


def test_a_training_on_a_full_disk_stops_with_its_message_and_resumes(tmp_path, migrated_database, monkeypatch):
    with small_disk(tmp_path / "workspace", 6) as disk:
        monkeypatch.setenv("RUNNER_WORKSPACE", str(disk))
        shutil.copy(migrated_database, disk / "mlflow.db")
        with training(tmp_path, disk, "train.env_steps=240", "train.checkpoint_every=40") as run:
            run.until(lambda: checkpoint.checkpoints(run.run_dir / "checkpoints"))
            fill(disk)
            run.until_said("held in memory until it can be written")
            run.hurry()
            run.until_said("was not written: it needs")
            run.child.send(signal.SIGTERM)
            assert run.child.wait() == 1
        assert "free some space and continue with: runner resume" in run.child.stderr.splitlines()[-1]
        assert "Traceback" not in run.child.stderr
        assert run.record["status"] == "FAILED"
        assert "could not be written" in run.record["reason"]
        assert checkpoint.load_newest(run.run_dir / "checkpoints") is not None
        look = start(tmp_path, "ls")
        assert look.wait() == 0, look.stderr

        free(disk)
        resumed = start(tmp_path, "resume", run.run_dir.name, "--json", "--plugin", str(PACING)).data()
        expected = points(records(run.run_dir))
        assert rows(disk / "mlflow.db", run.run_dir.name) == (expected, "FINISHED")
        steps = sorted(step for name, step, _ in expected if name == "train/critic_loss")
        assert resumed["status"] == run.record["status"] == "FINISHED"
        assert steps == list(range(steps[0], 241, 4))


def test_a_workspace_that_is_full_before_the_start_is_refused(tmp_path, migrated_database, monkeypatch):
    with small_disk(tmp_path / "workspace", 2) as disk:
        monkeypatch.setenv("RUNNER_WORKSPACE", str(disk))
        shutil.copy(migrated_database, disk / "mlflow.db")
        fill(disk)
        child = start(tmp_path, *arguments("marl_baseline"))
        assert child.wait() == 5
        assert "RUNNER_WORKSPACE" in child.stderr
        assert "Traceback" not in child.stderr
        assert list(disk.glob("runs/*")) == []


def faulty(folder, *faults, more=(), code):
    """Trains with faults to an exit code, without a traceback."""
    variables = {"RUNNER_FAULTS": ",".join(faults)}
    child = start(
        folder, *arguments("marl_baseline", "train.env_steps=80", "train.checkpoint_every=20", *more), **variables
    )
    assert child.wait() == code, child.stderr
    assert "Traceback" not in child.stderr
    return child


def status(workspace):
    """The run's folder, the status that it and MLflow agree on, and the points that MLflow has."""
    (run_dir,) = workspace.glob("runs/*")
    record = json.loads((run_dir / "run.json").read_text())
    found, status = rows(workspace / "mlflow.db", run_dir.name)
    assert status == record["status"]
    return run_dir, status, found


SAVING = [point for point in POINTS if point.startswith("checkpoint.")]
PRUNING = {"checkpoint.renamed", "checkpoint.pruned"}
SENDING = [point for point in POINTS if point.startswith(("spool.", "ship."))]
STARTING = ["start.folder", "start.tracked", "start.named"]
LOCKING = ["manifest.replaced", "start.locked"]
TUNING = "tuning.stored"
"""Fails in ``training/test_tuned_runs.py``, with a stage that tunes."""
TESTING = "run.tested"
"""Fails in ``training/test_final_test.py``, with data that have a test part."""


def test_no_point_is_forgotten():
    of_runs = {point for point in POINTS if not point.startswith("study.")}
    assert {*SAVING, *SENDING, *STARTING, *LOCKING, "resume.loaded", TUNING, TESTING} == of_runs


@pytest.mark.parametrize("action", ACTIONS)
def test_a_disk_that_fails_once_at_every_point_of_saving_and_sending_stops_nothing(
    action, tmp_path, migrated_workspace
):
    faults = [f"{point}={action}@2" for point in (*SAVING, *SENDING)]
    child = faulty(tmp_path, *faults, more=["train.env_steps=112", "train.checkpoint_every=8"], code=0)
    run_dir, ended, found = status(migrated_workspace)
    assert ended == "FINISHED"
    assert found == points(records(run_dir))
    assert "was not written" in child.stderr  # said once for all that follow each other
    assert child.stderr.count("could not be removed") == len(PRUNING)
    assert checkpoint.load_newest(run_dir / "checkpoints")["step"] == 112


@pytest.mark.parametrize(
    "fault", ["checkpoint.begin=raise@2+", "checkpoint.tensors=enospc@2+", "checkpoint.synced=raise@2+"]
)
def test_a_disk_that_fails_from_then_on_leaves_the_older_checkpoint(fault, tmp_path, migrated_workspace):
    child = faulty(tmp_path, fault, code=1)
    run_dir, ended, _ = status(migrated_workspace)
    assert ended == "FAILED"
    assert child.stderr.count("was not written") == 1
    assert "the checkpoint at 80 env_steps could not be written" in child.stderr.splitlines()[-1]
    assert checkpoint.load_newest(run_dir / "checkpoints")["step"] == 20


@pytest.mark.parametrize("fault", ["spool.append=enospc@2+", "spool.sync=raise@1+"])
def test_no_checkpoint_goes_beyond_what_was_logged_durably(fault, tmp_path, migrated_workspace):
    child = faulty(tmp_path, fault, code=1)
    run_dir, ended, _ = status(migrated_workspace)
    assert ended == "FAILED"
    assert "the disk refuses the run's metrics" in child.stderr.splitlines()[-1]
    assert checkpoint.checkpoints(run_dir / "checkpoints") == []


@pytest.mark.parametrize("fault", ["ship.sent=enospc@1+", "ship.placed=raise@1+"])
def test_what_mlflow_has_is_sent_again_if_that_cannot_be_noted(fault, tmp_path, migrated_workspace):
    faulty(tmp_path, fault, code=0)
    run_dir, ended, found = status(migrated_workspace)
    assert ended == "FINISHED"
    assert found == points(records(run_dir))
    assert start(tmp_path, "sync", run_dir.name).wait() == 0
    assert status(migrated_workspace) == (run_dir, ended, found)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", STARTING)
def test_a_disk_that_fails_at_the_start_leaves_no_run(point, action, tmp_path, migrated_workspace):
    child = faulty(tmp_path, f"{point}={action}", code=5)
    assert "name another disk in RUNNER_WORKSPACE" in child.stderr
    assert list(migrated_workspace.glob("runs/*")) == []


@pytest.mark.parametrize(("point", "action"), list(zip(LOCKING, ACTIONS, strict=True)))
def test_a_disk_that_fails_before_the_training_says_how_to_go_on(point, action, tmp_path, migrated_workspace):
    child = faulty(tmp_path, f"{point}={action}", code=1)
    run_dir, ended, _ = status(migrated_workspace)
    assert ended == "FAILED"
    assert f"when the disk takes files again: runner resume {run_dir.name}" in child.stderr
    resumed = start(tmp_path, "resume", run_dir.name, RUNNER_FAULTS=f"resume.loaded={action}")
    assert resumed.wait() == 1
    assert "Traceback" not in resumed.stderr
    assert f"runner resume {run_dir.name}" in resumed.stderr
    assert status(migrated_workspace)[1] == "FAILED"
    assert start(tmp_path, "resume", run_dir.name, "--json").data()["status"] == "FINISHED"
    assert status(migrated_workspace)[1] == "FINISHED"
