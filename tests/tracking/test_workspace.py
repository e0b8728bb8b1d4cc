from pathlib import Path

from runner.tracking.workspace import workspace


def test_the_folder_comes_from_the_argument_the_environment_or_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "environment"))
    assert workspace(tmp_path / "argument").root == tmp_path / "argument"
    assert workspace().root == tmp_path / "environment"
    monkeypatch.delenv("RUNNER_WORKSPACE")
    monkeypatch.chdir(tmp_path)
    assert workspace().root == tmp_path / ".runner"
    assert workspace("~/runs").root == Path.home() / "runs"


def test_nothing_is_created(tmp_path):
    workspace(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_store_is_a_database_in_the_workspace_unless_mlflow_names_another(monkeypatch):
    assert workspace().tracking_uri == f"sqlite:///{workspace().root}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert workspace().tracking_uri == "http://127.0.0.1:5000"
