from pathlib import Path

from runner.tracking.workspace import Workspace


def test_the_folder_comes_from_the_argument_the_environment_or_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "environment"))
    assert Workspace(tmp_path / "argument").root == tmp_path / "argument"
    assert Workspace().root == tmp_path / "environment"
    monkeypatch.delenv("RUNNER_WORKSPACE")
    monkeypatch.chdir(tmp_path)
    assert Workspace().root == tmp_path / ".runner"
    assert Workspace("~/runs").root == Path.home() / "runs"


def test_nothing_is_created(tmp_path):
    Workspace(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_store_is_a_database_in_the_workspace_unless_mlflow_names_another(monkeypatch):
    assert Workspace().tracking_uri == f"sqlite:///{Workspace().root}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert Workspace().tracking_uri == "http://127.0.0.1:5000"
