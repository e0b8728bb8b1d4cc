import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import run_folders
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param

from runner.system.errors import ExitCode, StorageError
from runner.tracking.access import is_http, on_network_disk
from runner.tracking.keys import mlflow_key
from runner.tracking.store import QUIET, Store, params_of, shown, text
from runner.tracking.workspace import Workspace, folder_name


def test_runners_that_open_a_fresh_workspace_together_all_succeed(tmp_path):
    code = """
import sys
from run_folders import recipe
from runner.tracking.tracker import Tracker
from runner.tracking import Workspace
tracker = Tracker.open(Workspace(), recipe(sys.argv[1], "together", seed=1), {})
tracker.log({"train/loss": 1.0}, step=1)
assert tracker.close("FINISHED")
"""
    path = {**os.environ, "PYTHONPATH": str(Path(run_folders.__file__).parent)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"run{n}"], env=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for n in range(2)
    ]
    for child in children:
        assert child.communicate() == (b"", b"")  # MLflow says nothing either
        assert child.returncode == 0
    client = Store(Workspace()).client
    found = client.search_runs([client.get_experiment_by_name("together").experiment_id])
    assert sorted(run.info.run_name[:4] for run in found) == ["run0", "run1"]
    assert {run.info.status for run in found} == {"FINISHED"}
    assert len(list(Workspace().runs.iterdir())) == 2


def test_the_database_keeps_a_write_ahead_log(migrated_workspace):
    Store(Workspace())
    with closing(sqlite3.connect(Workspace().database)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_workspace_that_cannot_be_made_is_a_storage_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(StorageError, match=r"file.*RUNNER_WORKSPACE") as caught:
        Store(Workspace(blocker / "workspace"))
    assert caught.value.exit_code == ExitCode.STORAGE_UNAVAILABLE


def test_a_database_that_is_none_is_a_storage_error(isolated_workspace):
    isolated_workspace.mkdir()
    (isolated_workspace / "mlflow.db").write_text("this is no database, " * 100)
    with pytest.raises(StorageError, match="not a database"):
        Store(Workspace())


def test_a_dead_server_is_a_storage_error_that_hides_the_password(monkeypatch):
    uri = "http://someone:hunter2@127.0.0.1:1"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(StorageError, match=r"refused.*unset MLFLOW_TRACKING_URI") as caught:
        Store(Workspace())
    assert "hunter2" not in str(caught.value)
    assert "http://127.0.0.1:1" in str(caught.value)
    assert not Workspace().root.exists()


def test_a_file_store_is_refused_as_mlflow_refuses_it(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    with pytest.raises(StorageError, match="sqlite"):
        Store(Workspace())


def test_mlflow_tracking_uri_is_honoured(monkeypatch, tmp_path, migrated_database):
    database = tmp_path / "mine.db"
    database.write_bytes(migrated_database.read_bytes())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    store = Store(Workspace())
    store.experiment("mine")
    assert not Workspace().database.exists()
    assert store.client.get_experiment_by_name("mine").artifact_location == (Workspace().artifacts / "mine").as_uri()


def test_settings_of_the_user_are_kept(monkeypatch, migrated_workspace):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    Store(Workspace())
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_passwords_are_not_shown():
    assert shown("postgresql://me:secret@db:5432/x") == "postgresql://db:5432/x"
    assert shown("sqlite:////tmp/a.db") == "sqlite:////tmp/a.db"


def test_servers_are_told_from_databases():
    assert is_http("https://host/path")
    assert not is_http("sqlite:///x.db")


@pytest.mark.parametrize(("path", "network"), [("/mnt/share/.runner/mlflow.db", True), ("/home/me/mlflow.db", False)])
def test_network_disks_are_recognised(monkeypatch, path, network):
    import psutil

    class Disk:
        def __init__(self, mountpoint, fstype):
            self.mountpoint, self.fstype = mountpoint, fstype

    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [Disk("/", "ext4"), Disk("/mnt/share", "nfs4")])
    assert on_network_disk(Path(path)) is network


def test_what_silences_mlflow_covers_telemetry():
    assert QUIET["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.fixture
def store(migrated_workspace):
    return Store(Workspace())


@pytest.fixture
def run_id(store):
    return store.create_run(store.experiment("tests"), "a")


def test_an_experiment_is_created_once_with_an_absolute_place_for_artifacts(store):
    created = store.experiment("marl")
    assert store.experiment("marl") == created
    assert store.client.get_experiment(created).artifact_location == (Workspace().artifacts / "marl").as_uri()


def test_a_deleted_experiment_is_an_error_with_its_remedy(store):
    store.client.delete_experiment(store.experiment("gone"))
    with pytest.raises(StorageError, match="mlflow experiments restore --experiment-id"):
        store.experiment("gone")


def test_a_run_is_found_by_its_name(store):
    experiment = store.experiment("tests")
    created = store.create_run(experiment, "marl-3f2a91c0")
    assert store.run_named(experiment, "marl-3f2a91c0") == created
    assert store.run_named(experiment, "marl") is None
    assert store.client.get_run(created).info.run_name == "marl-3f2a91c0"


def test_more_than_mlflow_takes_in_one_call_is_sent_in_several(store, run_id):
    metrics = [(f"m{n}", float(n), 1000 + n, n) for n in range(1001)]
    params = {f"p{n}": str(n) for n in range(101)}
    tags = {f"t{n}": str(n) for n in range(101)}
    store.send(run_id, metrics, params, tags)
    data = store.client.get_run(run_id).data
    assert data.metrics == {key: value for key, value, _, _ in metrics}
    assert data.params == params
    assert tags.items() <= data.tags.items()


def test_sending_twice_changes_nothing(store, run_id):
    metrics = [("loss", 0.5, 1000, 1), ("loss", 0.25, 2000, 2), ("loss", float("nan"), 3000, 3)]
    for _ in range(2):
        store.send(run_id, metrics, {"p": "1"}, {"t": "1"})
    assert len(store.client.get_metric_history(run_id, "loss")) == 3


def test_a_value_that_is_refused_for_good_does_not_stop_the_others(store, run_id, caplog):
    store.send(run_id, [], {"seed": "1"}, {})
    store.send(run_id, [("loss", 0.5, 1000, 1)], {"seed": "2", "other": "3"}, {})
    data = store.client.get_run(run_id).data
    assert data.params == {"seed": "1", "other": "3"}
    assert data.metrics == {"loss": 0.5}
    assert "MLflow refused param 'seed'" in caplog.text


def test_settings_become_dotted_params_spelled_as_json():
    settings = {
        "model": {"kind": "masac", "hidden": [64, 64], "lr": 1e-3, "extra": {}},
        "seed": 42,
        "stage": None,
        "on": True,
    }
    assert params_of(settings) == {
        "model.kind": "masac",
        "model.hidden": "[64, 64]",
        "model.lr": "0.001",
        "model.extra": "{}",
        "seed": "42",
        "stage": "null",
        "on": "true",
    }


def test_a_long_value_says_that_it_was_shortened():
    shortened = text("x" * 10_000)
    assert len(shortened) == 6000
    assert shortened.endswith(" ... [shortened from 10000 characters]")
    assert text("x" * 6000) == "x" * 6000


@given(st.text(min_size=1), st.text())
def test_mlflow_accepts_every_key_and_value(name, value):
    _validate_metric_name(mlflow_key(name))
    _validate_param(mlflow_key(name), text(value))


@given(st.from_regex(r"[a-z]+(/[a-z_]+)*", fullmatch=True).filter(lambda name: len(name) <= 250))
def test_ordinary_names_stay_as_they_are(name):
    assert mlflow_key(name) == name


@given(st.text())
def test_folder_names_stay_in_their_folder(name):
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", folder_name(name))
