"""A workspace that can only be read: what reads works, and what writes explains itself."""

import os
import shutil
import signal
import time

import pytest
from children import start
from disks import read_only
from running import TINY_DIGITS
from typer.main import get_command

from runner.cli import app

SHORT = [part for each in TINY_DIGITS for part in ("--set", each)]
STUDY = """
kind: study
name: rates
recipe: digits_classifier
set: [{sets}]
space:
  optimizer.lr: {{float: [0.001, 0.01], log: true}}
objectives:
  eval/accuracy: maximize
budget: {{trials: 1, seconds: 600}}
"""
READS = [
    "ls", "ls --json", "ls --kind run", "ls --since 2d", "ls --recipe digits_*", "ls --where eval/accuracy>0",
    "show FINISHED", "show FINISHED --json", "show latest", "show KILLED", "show LOCK", "show digits_classifier",
    "evaluate FINISHED -q", "evaluate FINISHED --json", "evaluate FINISHED --checkpoint last -q", "evaluate KILLED -q",
    "compare FINISHED KILLED", "compare FINISHED KILLED --json", "compare FINISHED KILLED --all",
    "models list", "models list --json", "models list digits", "validate digits_classifier", "validate LOCK",
    "recipes", "recipes --json", "plugins", "plugins --json", "schema", "schema study",
    "plan digits_classifier", "plan digits_classifier --json",
    "study show rates", "study show rates --json", "study best rates", "study plan STUDY --no-forecast", "data list",
    "rm --purge", "plugins digits", "submit digits_classifier --print", "submit LOCK --print --json",
]  # fmt: skip
WRITES = [
    "run digits_classifier SHORT -q", "run digits_classifier SHORT -q --json", "run LOCK -q",
    "run digits_classifier SHORT --seeds 2 -q", "run digits_classifier SHORT --resume -q", "resume -q",
    "resume KILLED -q", "resume KILLED --json", "rm FINISHED", "rm FINISHED --purge", "rm FINISHED KILLED", "rm KILLED",
    "sync", "sync KILLED", "sync FINISHED", "models register FINISHED --name more",
    "models register FINISHED --name digits",
    "ablate digits_classifier --budget 30", "ablate digits_classifier --metric memory",
    "profile digits_classifier SHORT --memory -q", "profile digits_classifier SHORT -q", "study run STUDY -q",
    "study run STUDY --fresh -q", "study worker rates -q", "submit digits_classifier",
]  # fmt: skip
OTHERS = {
    "serve": "it serves until it is stopped: see below",
    "ui": "it serves until it is stopped: see below",
    "doctor": "its exit code says whether runs can begin: see below",
    "verify": "it writes with --of alone: see below",
    "models promote": "it refuses what was not verified: see below",
    "data where": "it names where data are, not in a workspace",
    "data get": "it writes where data are, not into a workspace",
    "data prepare": "it writes a file of the user, not into a workspace",
    "init": "it writes into a folder of the user, not into a workspace",
    "data show": "it writes a picture into a folder of the user, not into a workspace",
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, migrated_database):
    """The folder of a project with a workspace that cannot be written, and its names."""
    project = tmp_path_factory.mktemp("project")
    root = project / ".runner"
    root.mkdir()
    shutil.copy(migrated_database, root / "mlflow.db")
    (project / "rates.yaml").write_text(STUDY.format(sets=", ".join(f"'{each}'" for each in TINY_DIGITS)))

    def do(*arguments, expected=0, **variables):
        child = start(project / "out", *arguments, within=project, RUNNER_WORKSPACE=str(root), **variables)
        assert child.wait() == expected, child.stderr

    do("run", "digits_classifier", *SHORT, "-q")
    (finished,) = root.glob("runs/*")
    do("models", "register", finished.name, "--name", "digits")
    faults = {"RUNNER_FAULTS": "checkpoint.pruned=kill@1"}
    do("run", "digits_classifier", *SHORT, "--set", "seed=9", "-q", expected=-signal.SIGKILL, **faults)
    (killed,) = set(root.glob("runs/*")) - {finished}
    do("study", "run", "rates.yaml", "-q")
    names = {"FINISHED": finished.name, "KILLED": killed.name, "STUDY": "rates.yaml"}
    names["LOCK"] = str(finished / "recipe.lock.yaml")
    with read_only(root):
        yield project, names


def begin(workspace, tmp_path, command):
    project, names = workspace
    words = [part for word in command.split() for part in (SHORT if word == "SHORT" else [names.get(word, word)])]
    return start(tmp_path, *words, within=project, RUNNER_WORKSPACE=str(project / ".runner"))


def content(workspace):
    return {path: path.lstat().st_mtime_ns for path in (workspace[0] / ".runner").rglob("*")}


@pytest.mark.parametrize("command", READS)
def test_what_reads_works(workspace, tmp_path, command):
    before = content(workspace)
    child = begin(workspace, tmp_path, command)
    assert child.wait() == 0, child.stderr
    assert "Traceback" not in child.stderr
    assert child.stdout or command == "rm --purge"
    assert content(workspace) == before


@pytest.mark.parametrize("command", WRITES)
def test_what_writes_explains_itself(workspace, tmp_path, command):
    child = begin(workspace, tmp_path, command)
    assert child.wait() == 5, child.stderr
    assert "Traceback" not in child.stderr
    assert "ead-only" in child.stderr or "cannot be written" in child.stderr or "readonly" in child.stderr


def test_every_command_is_among_these():
    root = get_command(app)
    commands = {
        f"{name} {inner}".strip()
        for name, command in root.commands.items()
        for inner in (getattr(command, "commands", None) or [""])
    }
    listed = [command for command in commands if any(f"{each} ".startswith(f"{command} ") for each in READS + WRITES)]
    assert commands == {*listed, *OTHERS}


def stopped(child, announcement):
    """The exit code of a server that has announced itself and is told to end."""
    deadline = time.monotonic() + 120
    try:
        while not (child.err.exists() and announcement in child.stderr):
            assert child.running, child.stderr
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send(signal.SIGTERM)
        return child.wait()
    finally:
        child.kill()


@pytest.mark.parametrize("model", ["FINISHED", "digits/1"])
def test_a_model_is_served(workspace, tmp_path, model):
    assert stopped(begin(workspace, tmp_path, f"serve {model} --port 0"), "answers on") == 0


def test_the_page_of_mlflow_is_served(workspace, tmp_path):
    stopped(begin(workspace, tmp_path, "ui --no-open"), "http://127.0.0.1:")


def test_doctor_reports_that_the_workspace_cannot_be_written(workspace, tmp_path):
    child = begin(workspace, tmp_path, "doctor")
    assert child.wait() == 1
    assert "cannot be written" in child.stdout
    assert "Traceback" not in child.stderr


def test_a_version_is_not_promoted_and_says_why(workspace, tmp_path):
    child = begin(workspace, tmp_path, "models promote digits 1")
    assert child.wait() == 5
    assert "Traceback" not in child.stderr


def test_models_are_loaded(workspace, monkeypatch):
    import runner

    project, names = workspace
    monkeypatch.setenv("RUNNER_WORKSPACE", str(project / ".runner"))
    assert os.access(project, os.W_OK)
    assert runner.load_model(names["FINISHED"]) is not None
    assert runner.load_model("digits/1") is not None
