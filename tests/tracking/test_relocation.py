import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from runner.tracking import Workspace
from runner.tracking.store import Store


def begun(root):
    """A workspace with an experiment, a run, an artifact and a logged model."""
    workspace = Workspace(root)
    store = Store(workspace)
    run_id = store.create_run(store.experiment("tests"), "first")
    (root / "note.txt").write_text("hello")
    store.log_artifact(run_id, root / "note.txt")
    store.send(run_id, [], {}, {"run_dir": str(root / "runs/first"), "beside": f"{root}-not-inside"})
    (root / "model").mkdir()
    (root / "model/weights").write_text("1")
    store.log_model(run_id, root / "model", 1)
    return run_id


@pytest.mark.parametrize("name", ["renamed", "a b", "50%_off", "über"])
def test_a_moved_workspace_finds_what_mlflow_records(migrated_workspace, tmp_path, name, caplog):
    run_id = begun(migrated_workspace)
    moved = tmp_path / name
    migrated_workspace.rename(moved)
    store = Store(Workspace(moved))
    assert f"the workspace was moved from {migrated_workspace} to {moved}" in caplog.text
    assert [artifact.path for artifact in store.client.list_artifacts(run_id)] == ["note.txt"]
    tags = store.client.get_run(run_id).data.tags
    assert (tags["run_dir"], tags["beside"]) == (str(moved / "runs/first"), f"{migrated_workspace}-not-inside")
    model = store.logged_model(run_id, moved / "model", 1)
    assert (store.model(model.model_uri) / "weights").read_text() == "1"
    new_run = store.create_run(store.experiment("tests"), "second")
    store.log_artifact(new_run, moved / "note.txt")
    assert not migrated_workspace.exists()


def test_a_copied_workspace_leaves_the_first_alone(migrated_workspace, tmp_path):
    run_id = begun(migrated_workspace)
    copy = tmp_path / "copy"
    shutil.copytree(migrated_workspace, copy)
    for root in (copy, migrated_workspace, copy):
        store = Store(Workspace(root))
        assert store.client.get_run(run_id).info.artifact_uri.startswith((root / "artifacts").as_uri())


def test_a_link_to_a_workspace_is_no_move(migrated_workspace, tmp_path, caplog):
    begun(migrated_workspace)
    (tmp_path / "link").symlink_to(migrated_workspace)
    Store(Workspace(tmp_path / "link"))
    assert "was moved" not in caplog.text


def test_a_workspace_without_a_record_of_its_place_stays_as_it_is(migrated_workspace):
    begun(migrated_workspace)
    (migrated_workspace / "root").unlink()
    Store(Workspace())
    assert Path((migrated_workspace / "root").read_text().strip()) == migrated_workspace
    with closing(sqlite3.connect(migrated_workspace / "mlflow.db")) as database:
        (location,) = database.execute("SELECT artifact_location FROM experiments WHERE name = 'tests'").fetchone()
    assert location == (migrated_workspace / "artifacts/tests").as_uri()


def test_records_name_the_own_database_without_its_place(tmp_path):
    workspace = Workspace(tmp_path / "here")
    recorded = workspace.recorded_uri(workspace.tracking_uri)
    assert str(tmp_path) not in recorded
    assert Workspace(tmp_path / "there").resolved_uri(recorded) == f"sqlite:///{tmp_path}/there/mlflow.db"
    assert workspace.recorded_uri("http://127.0.0.1:5000") == "http://127.0.0.1:5000"
