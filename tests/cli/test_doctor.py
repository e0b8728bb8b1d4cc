import io
import json
from importlib import metadata
from importlib.metadata import EntryPoint

import psutil
import pytest
from run_folders import run_folder
from typer.testing import CliRunner

from runner.cli import app, diagnosis
from runner.cli.diagnosis import examine, show
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.tracking.workspace import Workspace

BROKEN = (EntryPoint("model.mine", "a_module_that_is_missing:Mine", "runner.plugins"),)


@pytest.fixture
def checks():
    """Examines this machine and returns the checks by name."""

    def checks(where=None, installed=()):
        return {check.name: check for check in examine(Workspace(where), Registry(installed=installed))}

    return checks


def test_a_machine_that_passes_these_tests_is_fit(checks):
    found = checks()
    assert "fail" not in {check.status for check in found.values()}
    assert found["plugins"].found == "all can be imported"
    assert "mlflow" in found["packages"].found
    assert found["processor"].status == "ok"
    assert found["workspace"].found.endswith("created by the first run")
    assert not Workspace().root.exists()


def test_every_warning_has_a_remedy(checks):
    assert all(check.remedy for check in checks().values() if check.status != "ok")


def test_the_store_is_opened_where_there_is_one(checks, migrated_workspace):
    assert checks()["tracking"].found.endswith("mlflow.db answers")


def test_a_dead_server_fails_with_its_remedy(checks, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    found = checks()
    assert found["tracking"].status == "fail"
    assert "MLFLOW_TRACKING_URI" in found["tracking"].remedy
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert (printed.exit_code, json.loads(printed.stdout)["ok"]) == (1, False)


def test_a_file_in_the_place_of_the_workspace_fails(checks, tmp_path):
    (tmp_path / "file").touch()
    found = checks(tmp_path / "file" / "workspace")["workspace"]
    assert (found.status, found.remedy) == ("fail", "name a writable folder in RUNNER_WORKSPACE")


def test_a_package_that_is_too_old_or_missing_fails(checks, monkeypatch):
    required = ["psutil>=9999", "no-such-package>=1", "rich>=1", 'pytest>=9999; extra == "test"']
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    found = checks()
    assert found["psutil"].found.endswith(">=9999 is needed")
    assert found["no-such-package"].remedy == "pip install 'no-such-package>=1'"
    assert found["packages"].found.startswith("rich ")
    assert "pytest" not in found


def test_a_broken_plugin_is_named_with_its_reason(checks):
    found = checks(installed=BROKEN)
    assert found["plugin model.mine"].found.endswith("No module named 'a_module_that_is_missing'")
    assert "plugins" not in found


def test_no_compiler_is_a_warning(checks, monkeypatch):
    monkeypatch.setattr(diagnosis.shutil, "which", lambda _: None)
    assert checks()["compiler"].status == "warn"


def test_little_memory_and_disk_are_warnings(checks, monkeypatch, tmp_path):
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(tmp_path))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=2**20))
    monkeypatch.setattr(psutil, "disk_usage", lambda _: disk._replace(free=2**20))
    found = checks()
    assert found["memory"].status == found["disk"].status == "warn"


def test_more_threads_than_cores_is_a_warning(checks, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert checks()["threads"].remedy.startswith("set OMP_NUM_THREADS=")


def test_runs_that_died_are_ended_and_counted(checks, migrated_workspace):
    folder = run_folder()
    assert checks()["runs"].found == f"1 in {Workspace().runs}; 1 had crashed: {folder.name}"
    assert folder.record().status == "KILLED"
    assert checks()["runs"].found == f"1 in {Workspace().runs}"


def test_runs_with_something_to_send_are_a_warning(checks, migrated_workspace):
    away = {"tracking_uri": "http://127.0.0.1:1", "status": "FINISHED"}
    names = {run_folder(**away).name for _ in range(6)}
    found = checks()["unsent"]
    assert (found.status, found.remedy) == ("warn", "runner sync")
    assert found.found.startswith("metrics are missing in MLflow for 6 runs: ")
    assert sum(name in found.found for name in names) == 4


def test_runs_whose_record_is_damaged_are_named(checks, migrated_workspace):
    folder = run_folder()
    (folder.path / "run.json").write_text("{")
    found = checks()["damaged runs"]
    assert found.status == "warn"
    assert found.found == f"run.json of 1 runs cannot be read: {folder.name}"


def test_it_prints_as_a_table_and_as_json(checks):
    screen = io.StringIO()
    show(list(checks(installed=BROKEN).values()), Console(file=screen, width=80))
    assert "-> reinstall or remove its distribution" in screen.getvalue()
    printed = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert printed["ok"] is True
    assert {"name", "status", "found", "remedy"} == set(printed["checks"][0])
