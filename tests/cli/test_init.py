"""What ``runner init`` writes trains, passes its own test, and follows the rules for Python files."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from typer.testing import CliRunner

from runner.cli import app
from runner.system.errors import UsageError

CONFIG = "select = ['E', 'F', 'I', 'N', 'UP', 'B']"


def made(folder):
    result = CliRunner().invoke(app, ["init", str(folder)])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.usefixtures("migrated_workspace")
def test_the_test_passes_as_it_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "my_net"
    made(folder)
    spec = spec_from_file_location("generated_test", folder / "test_my_net.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    workspace = tmp_path / "workspace"
    module.test_it_learns_and_its_model_predicts(workspace, monkeypatch)
    assert list(workspace.glob("runs/my_net-*/checkpoints/step-*"))


def test_files_and_next_commands_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = made("net2")
    assert result.stdout.split() == ["net2/net2.py", "net2/net2.yaml", "net2/test_net2.py"]
    assert "runner run net2/net2.yaml --plugin net2/net2.py" in result.stderr
    subprocess.run([sys.executable, "-m", "ruff", "format", "--check", "net2"], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "check", "--config", f"lint.{CONFIG}", "net2"], check=True)


@pytest.mark.parametrize("name", ["My_net", "2nets", "my-net", "class", "mlp", "digits", "né", "a b"])
def test_a_name_that_no_plugin_can_have_is_refused(name, tmp_path):
    result = CliRunner().invoke(app, ["init", str(tmp_path / name)])
    assert isinstance(result.exception, UsageError)
    assert f"'{name}'" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    result = CliRunner().invoke(app, ["init", str(folder)])
    assert str(result.exception) == f"{folder} exists already, and is not overwritten"
    assert list(folder.iterdir()) == []
