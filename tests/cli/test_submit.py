"""The command that writes or submits a job of a cluster."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from children import start
from running import TINY_DIGITS
from toy_runs import TOYS
from typer.testing import CliRunner

from runner.cli import app
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import StorageError, UsageError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "slurm.md"
KUBERNETES = ("--kind", "kubernetes", "--image", "image:1", "--claim", "claim", "--print")
SERVER = "postgresql://user@host/studies"
STUDY = """
kind: study
name: rates
recipe: digits_classifier
space:
  optimizer.lr: {float: [0.001, 0.01], log: true}
objectives:
  eval/accuracy: maximize
budget: {trials: 1, seconds: 600}
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with a study, and an environment without servers."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "OPTUNA_STORAGE", "RUNNER_WORKSPACE", "RUNNER_DATA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rates.yaml").write_text(STUDY)
    return tmp_path


def submit(*words):
    """Returns what the command prints on stdout and stderr; raises its error."""
    done = CliRunner().invoke(app, ["submit", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def task_of(script):
    """Returns the words of the runner in a batch script, after those of srun."""
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    words = shlex.split(line)
    return words[words.index(str(Path(sys.executable).with_name("runner"))) + 1 :]


def test_a_recipe_is_a_task_that_resumes_with_the_settings_of_the_user(tmp_path):
    shutil.copy(TOYS, tmp_path / "mine.py")
    script, warnings = submit(
        "digits_classifier", "optimizer.lr=1e-3", "--set", "seed=7", "--plugin", "mine.py", "--tag", "a=b c",
        "--note", "it's", "--print",
    )  # fmt: skip
    assert task_of(script) == [
        *("run", "digits_classifier", "seed=7", "optimizer.lr=1e-3", "train.preemptible=true", "--plugin", "mine.py"),
        *("--tag", "a=b c", "--note", "it's", "--resume", "--quiet"),
    ]
    assert "--array" not in script
    assert "OPTUNA" not in script
    assert warnings.endswith(f"before sbatch, create the folder of the output: {tmp_path / '.runner' / 'slurm'}\n")
    assert "warning" not in warnings
    assert not (tmp_path / ".runner").exists()


def test_every_seed_is_a_task():
    script, warnings = submit("digits_classifier", "seed=7", "--seeds", "3", "--nproc", "2", "--print")
    assert "#SBATCH --array=0-2" in script
    assert script.count("seed=$((7 + SLURM_ARRAY_TASK_ID))") == 1
    assert "--nproc 2 --resume --quiet seed=" in script
    assert "3 tasks share a file of SQLite" in warnings


def test_the_task_that_is_written_trains_the_recipe(tmp_path, monkeypatch, migrated_workspace):
    """The words of the script, with the number of an array's task, train that seed."""
    monkeypatch.setenv("RUNNER_WORKSPACE", str(migrated_workspace))
    script, _ = submit("digits_classifier", *TINY_DIGITS, "--seeds", "2", "--print")
    words = task_of(script.replace("$((0 + SLURM_ARRAY_TASK_ID))", "1"))
    assert start(tmp_path / "out", *words).wait() == 0
    (lock,) = migrated_workspace.glob("runs/*/recipe.lock.yaml")
    recipe = yaml.safe_load(lock.read_text())["recipe"]
    assert recipe["seed"] == 1
    assert recipe["train"]["preemptible"] is True


def test_mistakes_of_a_recipe_have_their_lines_and_nothing_is_printed(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: mine\nextends: digits_classifier\ntrain: {epoch: 3}\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml:3:9: train\.epoch: "):
        submit("mine.yaml", "--print")
    (tmp_path / "rates.yaml").write_text(STUDY.replace("optimizer.lr", "optimizer.rate"))
    with pytest.raises(RecipeError, match=r"rates\.yaml:6:\d+: .*optimizer\.rate"):
        submit("rates.yaml", "--print")


def test_the_workers_of_a_study_need_a_server(monkeypatch):
    with pytest.raises(UsageError, match="OPTUNA_STORAGE names no server, and 4 workers"):
        submit("rates.yaml", "--workers", "4", "--print")
    _, warnings = submit("rates.yaml", "--print")
    assert "warning: OPTUNA_STORAGE names no server" in warnings
    for storage in ("sqlite:////shared/optuna.db", "/shared/optuna.db"):
        monkeypatch.setenv("OPTUNA_STORAGE", storage)
        with pytest.raises(UsageError, match="names no server"):
            submit("rates.yaml", "--workers", "4", "--print")

    monkeypatch.setenv("OPTUNA_STORAGE", SERVER)
    script, _ = submit("rates.yaml", "optimizer.lr=1e-2", "--workers", "4", "--print")
    assert task_of(script) == ["study", "worker", "rates.yaml", "optimizer.lr=1e-2", "--quiet"]
    assert f"export OPTUNA_STORAGE={SERVER}\n" in script
    assert "#SBATCH --array=0-3" in script
    assert '[ "$code" -eq 143 ]' in script


def test_a_password_is_in_no_script(monkeypatch):
    monkeypatch.setenv("OPTUNA_STORAGE", SERVER.replace("user", "user:hunter2hunter2"))
    script, _ = submit("rates.yaml", "--workers", "4", "--print")
    assert "hunter2" not in script
    assert '"${OPTUNA_STORAGE:?' in script
    with pytest.raises(UsageError, match="--secret OPTUNA_STORAGE=SECRET:KEY"):
        submit("rates.yaml", *KUBERNETES)
    manifest, _ = submit("rates.yaml", *KUBERNETES, "--secret", "OPTUNA_STORAGE=studies:url")
    assert "hunter2" not in manifest
    assert "secretKeyRef" in manifest
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://host")
    with pytest.raises(UsageError, match="contains a secret"):
        submit("digits_classifier", "--note", "https://user:hunter2hunter2@host", "--print")


def test_kubernetes_gets_servers_and_no_files_of_this_machine(monkeypatch):
    monkeypatch.setenv("RUNNER_DATA", "/data")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    monkeypatch.setenv("OPTUNA_STORAGE", "sqlite:////here.db")
    manifest = yaml.safe_load(submit("digits_classifier", *KUBERNETES, "--memory", "2GiB", "--gpus", "1")[0])
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    copied = [entry["name"] for entry in container["env"] if "valueFrom" not in entry]
    assert copied == ["RUNNER_WORKSPACE", "MLFLOW_TRACKING_URI", "RUNNER_JOB"]
    assert container["resources"]["limits"] == {"memory": "2048Mi", "nvidia.com/gpu": "1"}
    script, _ = submit("digits_classifier", "--print")
    assert "export RUNNER_DATA=/data\n" in script


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["digits_classifier", "--workers", "2"], "--workers is for studies"),
        (["rates.yaml", "--seeds", "2"], "--seeds is for recipes"),
        (["rates.yaml", "--note", "x"], "--note is for recipes"),
        (["digits_classifier", "--image", "x"], "--image is for --kind kubernetes"),
        (["digits_classifier", "--secret", "A=b:c"], "--secret is for --kind kubernetes"),
        (["digits_classifier", *KUBERNETES, "--nodes", "2"], "--nodes is for --kind slurm"),
        (["digits_classifier", *KUBERNETES, "--time", "1"], "--time is for --kind slurm"),
        (["digits_classifier", *KUBERNETES, "--option", "a=b"], "--option is for --kind slurm"),
        (["digits_classifier", "--kind", "kubernetes", "--image", "x"], "needs --claim"),
        (["digits_classifier", *KUBERNETES[:-1]], "needs --print"),
        (["digits_classifier", "--memory", "16"], "--memory: should be a number"),
        (["digits_classifier", "--time", "2h"], "--time: should be"),
        (["digits_classifier", "--tag", "x"], "--tag 'x'"),
        (["digits_classifier", "seed=1,2"], "seed: has several values"),
        (["digits_classifier", "train.batch_size=2", "--nproc", "2", "--nodes", "2"], "cannot be divided among 4"),
        (["pgt_cora", "--nproc", "2"], "couples the samples"),
        (["nothing"], "nothing"),
    ],
)
def test_options_that_contradict_are_refused(words, problem):
    with pytest.raises(UsageError, match=re.escape(problem)):
        submit(*words)


def test_a_job_is_submitted(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n/bin/cat > ../script; echo 4711\n".replace("..", str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    printed, _ = submit("digits_classifier", "--seeds", "2")
    output = tmp_path / ".runner" / "slurm"
    assert printed.splitlines() == [
        "job 4711 with 2 tasks", "state     squeue --job 4711", "runs      runner ls", f"output    {output}",
    ]  # fmt: skip
    assert output.is_dir()
    script = submit("digits_classifier", "--seeds", "2", "--print")[0]
    assert (tmp_path / "script").read_text() == script
    reply = json.loads(submit("digits_classifier", "--seeds", "2", "--json")[0])
    assert (reply["job"], reply["tasks"], reply["script"]) == ("4711", 2, script)
    assert json.loads(submit("digits_classifier", "--print", "--json")[0])["script"].startswith("#!/bin/bash\n")

    program.unlink()
    with pytest.raises(UsageError, match="sbatch is not installed here"):
        submit("digits_classifier")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written"):
        submit("digits_classifier")


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    text = PAGE.read_text()
    (command,) = re.findall(r"^runner (submit .*) --print > seeds\.sbatch$", text, re.MULTILINE)
    (shown,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    script, _ = submit(*shlex.split(command)[1:], "--print")
    program = str(Path(sys.executable).with_name("runner"))
    assert script.replace(program, "/home/me/venv/bin/runner").replace(str(tmp_path), "/home/me/project") == shown
