"""MLflow goes away in the middle of a training: nothing waits for it, and nothing is missing in the end."""

import shutil
import signal
import sqlite3
import time
from contextlib import closing

import pytest
from children import start
from disks import fill, free, small_disk
from interrupted import arguments
from outages import points, records, rows, training
from servers import server, slow_way

pytestmark = pytest.mark.long
OUTAGE_SECONDS = 1.0
"""How much longer than it takes to notice the server stays dead."""


@pytest.fixture
def database(tmp_path, migrated_database):
    """The file behind the server, outside of the workspace."""
    path = tmp_path / "server.db"
    shutil.copy(migrated_database, path)
    return path


def delivered(training, database):
    """Asserts that MLflow has every point of the spool once and nothing else; returns the run's status there."""
    found, status = rows(database, training.run_dir.name)
    expected = points(records(training.run_dir))
    assert found == expected
    assert set(expected.values()) == {1}
    assert len({(name, step) for name, step, _ in expected}) == len(expected)
    return status


def sync(folder, *arguments, **variables):
    child = start(folder, "sync", *arguments, **variables)
    assert child.wait() == 0, child.stderr
    return child.stdout


def test_a_server_that_is_killed_costs_no_metric(tmp_path, isolated_workspace, database, monkeypatch):
    with server(database, tmp_path / "artifacts") as mlflow:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.address)
        with training(tmp_path, isolated_workspace, seconds=0.2) as run:
            mlflow.kill()
            run.until_said("MLflow does not take metrics; they wait in")
            run.goes_on()
            time.sleep(OUTAGE_SECONDS)
            mlflow.start()
            run.until_said("MLflow takes metrics again; nothing was lost")
            assert run.end() == 0
            said = run.child.stderr
        assert (said.count("does not take metrics"), said.count("takes metrics again")) == (1, 1)
        assert "Traceback" not in said
        assert run.record["status"] == delivered(run, database) == "FINISHED"
        for _ in range(2):
            (run.run_dir / "spool.offset").unlink()
            assert f"{run.size} bytes sent" in sync(tmp_path)
            assert delivered(run, database) == "FINISHED"
        assert sync(tmp_path) == ""


def test_a_server_that_is_slow_or_hangs_for_good_is_not_waited_for(tmp_path, isolated_workspace, database, monkeypatch):
    with server(database, tmp_path / "artifacts") as mlflow, slow_way(mlflow.port, 0.1) as way:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", way.address)
        quick = ("train.env_steps=240", "optimization.paced.patience=3")
        with training(tmp_path, isolated_workspace, *quick) as run:
            run.goes_on()
            way.hanging.set()
            run.goes_on()
            assert run.end() == 0
        assert run.record["status"] == "FINISHED"
        assert f"send them later: runner sync {run.run_dir.name}" in run.child.stderr
        way.hanging.clear()
        assert "bytes sent" in sync(tmp_path, run.run_dir.name)
        assert delivered(run, database) == "FINISHED"
        assert sync(tmp_path) == ""


def test_a_database_that_is_locked_gets_everything_later(tmp_path, migrated_workspace):
    database = migrated_workspace / "mlflow.db"
    with training(tmp_path, migrated_workspace, "train.env_steps=240") as run:
        with closing(sqlite3.connect(database, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            run.goes_on(60)
            other.execute("ROLLBACK")
        assert run.end() == 0
        assert run.child.stderr == ""
    assert run.record["status"] == delivered(run, database) == "FINISHED"


def test_a_store_whose_disk_is_full_gets_everything_later(tmp_path, isolated_workspace, migrated_database, monkeypatch):
    with small_disk(tmp_path / "store", 4) as disk:
        database = disk / "mlflow.db"
        shutil.copy(migrated_database, database)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
        with training(tmp_path, isolated_workspace) as run:
            fill(disk)
            run.until_said("MLflow does not take metrics; they wait in")
            run.goes_on()
            run.child.send(signal.SIGTERM)
            assert run.child.wait() == 143
            assert f"send them later: runner sync {run.run_dir.name}" in run.child.stderr
            assert "Traceback" not in run.child.stderr
        free(disk)
        assert "bytes sent" in sync(tmp_path)
        assert run.record["status"] == "STOPPED"
        assert delivered(run, database) == "KILLED"


def test_what_a_dead_process_left_is_sent_although_it_is_damaged(tmp_path, migrated_workspace):
    dead = start(tmp_path, *arguments("marl_baseline"), RUNNER_FAULTS="checkpoint.renamed=kill")
    assert dead.wait() == -signal.SIGKILL
    (run_dir,) = migrated_workspace.glob("runs/*")
    expected = points(records(run_dir))
    spool = run_dir / "spool.jsonl"
    lines = spool.read_bytes().split(b"\n")
    lines.insert(len(lines) // 2, b'{"t":1,"step":"\xff')
    spool.write_bytes(b"\n".join(lines) + b'{"t":1,"step":9,"metr')
    (run_dir / "spool.offset").write_bytes(b"\xff\0 what?")
    for _ in range(2):
        sent = start(tmp_path, "sync", run_dir.name)
        assert sent.wait() == 0
        assert "Traceback" not in sent.stderr
        assert rows(migrated_workspace / "mlflow.db", run_dir.name) == (expected, "KILLED")
    assert start(tmp_path, "ls", "--json").data()["runs"][0]["unsent_bytes"] == 0
