"""Commands in surroundings that a shell, a scheduler or a container leaves behind."""

import subprocess
import sys
import warnings

import pytest
from children import start

from runner.system.errors import ExitCode
from runner.tracking import Workspace
from runner.tracking.store import Store


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("verb", [("ls",), ("run", "--help"), ("recipes",)])
@pytest.mark.parametrize("columns", ["0", "80"])
def test_a_terminal_that_does_not_know_its_width_is_one_of_80_columns(tmp_path, verb, columns):
    printed = [start(tmp_path, *verb, COLUMNS=width) for width in (columns, "80")]
    assert [child.wait() for child in printed] == [0, 0]
    assert len(printed[0].stdout + printed[0].stderr) > 10
    assert printed[0].stdout == printed[1].stdout


GONE = """\
import os, sys
os.chdir(sys.argv[1])
os.rmdir(sys.argv.pop(1))
from runner.cli import main
main()
"""


@pytest.mark.parametrize("words", [("show", "latest"), ("validate", "x.yaml")])
def test_a_folder_that_is_gone_is_one_message(tmp_path, words):
    command = [sys.executable, "-c", GONE, str(tmp_path / "gone"), *words]
    (tmp_path / "gone").mkdir()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr == "error: the working directory does not exist any more: change to another one\n"


def test_a_user_whose_warnings_are_errors_can_track(migrated_workspace):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(Workspace())
        run = store.create_run(store.experiment("mine"), "a run")
        assert store.has_run(run)
