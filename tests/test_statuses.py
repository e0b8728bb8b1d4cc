"""A run ends with the status, the exit code and the message that are true, whatever ends it."""

import json
import os
import re
import signal

import mlflow
import pytest
from children import start
from interrupted import arguments
from running import RECIPES

from runner.training import checkpoint

pytestmark = pytest.mark.usefixtures("migrated_workspace")

TROUBLE = """
import os, sys
from runner.api import Exact, RunnerError, Stage, StageConfig

class TroubleConfig(StageConfig):
    "Ends a run in the way that it is told to."
    kind = "trouble"
    implementation = "Trouble"
    phase = 1
    wraps = frozenset({"transfer"})

    def contract(self, setting):
        return Exact()

class Trouble(Stage):
    def attach(self, pipeline):
        updates = 0
        def troubled(step):
            def transfer(batch):
                nonlocal updates
                updates += 1
                if updates == 8:
                    exec(os.environ["TROUBLE"])
                return step(batch)
            return transfer
        pipeline.slots.wrap("transfer", troubled)
"""


def troubled(tmp_path, action, *more):
    plugin = tmp_path / "trouble.py"
    plugin.write_text(TROUBLE)
    command = arguments(
        "marl_baseline", "optimization.trouble=on", "train.checkpoint_every=24", "train.env_steps=96", *more
    )
    command.remove("--resume")
    return start(tmp_path, *command, "--plugin", str(plugin), TROUBLE=action)


def status_in_mlflow(workspace):
    (record,) = workspace.glob("runs/*/run.json")
    record = json.loads(record.read_text())
    run = mlflow.MlflowClient(f"sqlite:///{workspace}/mlflow.db").get_run(record["run_id"])
    # MLflow has no status of its own for a stopped run.
    assert run.info.status == ("KILLED" if record["status"] in ("STOPPED", "PREEMPTED") else record["status"])
    return record["status"], run.data.tags.get("error")


@pytest.mark.parametrize(
    ("action", "code", "status", "error"),
    [
        ("raise RuntimeError('out of luck')", 1, "FAILED", "RuntimeError: out of luck"),
        ("raise RunnerError('a clear message')", 1, "FAILED", "a clear message"),
        ("sys.exit(3)", 1, "FAILED", "sys.exit(3) was called; raise an exception instead"),
        ("sys.exit(0)", 1, "FAILED", "sys.exit(0) was called; raise an exception instead"),
        ("raise MemoryError", 1, "FAILED", "MemoryError"),
        ("batch['reward'] = batch['reward'] * float('nan')", 6, "FAILED", "env_steps 96, update 8: tensor 'reward'"),
        ("os.kill(os.getpid(), 15)", 143, "STOPPED", None),
        ("os.kill(os.getpid(), 2)", 130, "STOPPED", None),
        ("[os.kill(os.getpid(), 2) for _ in range(2)]", 130, "STOPPED", None),
    ],
)
def test_the_status_is_what_happened(action, code, status, error, tmp_path, isolated_workspace):
    child = troubled(tmp_path, action)
    assert child.wait() == code, child.stderr
    found, said = status_in_mlflow(isolated_workspace)
    assert found == status
    assert (error in said) if error else said is None
    (run,) = isolated_workspace.glob("runs/*")
    assert checkpoint.load_newest(run / "checkpoints") is not None
    if error:
        assert "Traceback" not in child.stderr
        assert error in child.stderr


def test_a_nan_leaves_a_diagnosis_and_the_last_good_checkpoint(tmp_path, isolated_workspace):
    child = troubled(tmp_path, "batch['reward'] = batch['reward'] * float('nan')")
    assert child.wait() == 6
    (run,) = isolated_workspace.glob("runs/*")
    diagnosis = json.loads((run / "diagnosis.json").read_text())
    assert diagnosis["step"] == 96
    good = checkpoint.checkpoints(run / "checkpoints")[-1]
    assert str(good) in child.stderr
    assert str(run / "diagnosis.json") in child.stderr
    client = mlflow.MlflowClient(f"sqlite:///{isolated_workspace}/mlflow.db")
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert "diagnosis.json" in {artifact.path for artifact in client.list_artifacts(run_id)}


@pytest.mark.parametrize("verb", [("ls",), ("resume",), ("doctor",), ("sync",)])
def test_a_run_that_was_killed_is_found_dead_by_the_next_verb(verb, tmp_path, isolated_workspace):
    child = troubled(tmp_path, "os.kill(os.getpid(), 9)")
    assert child.wait() == -signal.SIGKILL
    assert status_in_mlflow(isolated_workspace)[0] == "RUNNING"
    (tmp_path / "trouble.py").unlink()  # or resume would go on with it
    look = start(tmp_path, *verb)
    look.wait()
    assert status_in_mlflow(isolated_workspace)[0] == "KILLED", look.stderr


def killed(tmp_path, workspace):
    command = arguments("marl_baseline", "train.checkpoint_every=28", "train.env_steps=96")
    child = start(tmp_path, *command, RUNNER_FAULTS="checkpoint.pruned=kill@3")
    assert child.wait() == -signal.SIGKILL
    (run,) = workspace.glob("runs/*")
    return run


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(tmp_path, isolated_workspace):
    run = killed(tmp_path, isolated_workspace)
    newest = checkpoint.checkpoints(run / "checkpoints")[-1]
    os.truncate(newest / "tensors-0.safetensors", 100)
    child = start(tmp_path, "resume")
    assert child.wait() == 0
    assert "tensors-0.safetensors: damaged" in child.stderr
    assert "Traceback" not in child.stderr
    assert "FINISHED" in child.stdout


def test_when_all_checkpoints_are_damaged_the_exit_code_is_7(tmp_path, isolated_workspace):
    run = killed(tmp_path, isolated_workspace)
    for each in checkpoint.checkpoints(run / "checkpoints"):
        (each / "state.json").unlink()
    child = start(tmp_path, "resume")
    assert child.wait() == 7
    assert "are damaged" in child.stderr
    assert "Traceback" not in child.stderr


def test_a_run_without_a_lock_cannot_be_resumed_and_says_so(tmp_path, isolated_workspace):
    assert start(tmp_path, *arguments("marl_baseline"), RUNNER_FAULTS="start.tracked=kill").wait() == -signal.SIGKILL
    child = start(tmp_path, "resume", "marl_baseline")
    assert child.wait() == 7
    assert "before its lock was written" in child.stderr


@pytest.mark.parametrize("point", ["start.tracked", "start.named"])
def test_a_run_that_is_killed_while_it_begins_has_one_id_everywhere(point, tmp_path, isolated_workspace):
    assert start(tmp_path, *arguments("marl_baseline"), RUNNER_FAULTS=f"{point}=kill").wait() == -signal.SIGKILL
    assert start(tmp_path, "ls").wait() == 0
    (run,) = isolated_workspace.glob("runs/*")
    record = json.loads((run / "run.json").read_text())
    info = mlflow.MlflowClient(f"sqlite:///{isolated_workspace / 'mlflow.db'}").get_run(record["run_id"]).info
    assert run.name == record["name"] == info.run_name == f"marl_baseline-{info.run_id[:8]}"
    assert record["status"] == info.status == "KILLED"


def test_drift_that_matters_is_refused_unless_it_is_allowed(tmp_path, isolated_workspace):
    run = killed(tmp_path, isolated_workspace)
    lock = run / "recipe.lock.yaml"
    lock.write_text(re.sub(r"(?m)^(  torch: ).*$", r"\g<1>'1.0'", lock.read_text(), count=1))
    (run / "runner-manifest.json").unlink()  # or the lock would count as damaged
    child = start(tmp_path, "resume")
    assert child.wait() == 2
    assert "packages.torch: 1.0 in the lock" in child.stderr
    assert "--allow-drift" in child.stderr
    child = start(tmp_path, "run", str(lock), "--resume", "--allow-drift")
    assert child.wait() == 0
    assert child.stderr.count("drift: packages.torch") == 1


def test_a_finished_run_is_not_resumed_and_run_resume_begins_anew(tmp_path, isolated_workspace):
    command = arguments("marl_baseline", "train.env_steps=68")
    first = start(tmp_path, *command).data()
    child = start(tmp_path, "resume", first["run_name"])
    assert child.wait() == 2
    assert "it is finished; model.init_from=" in child.stderr
    assert start(tmp_path, "resume").wait() == 2
    assert start(tmp_path, *command).data()["run_id"] != first["run_id"]


def test_resume_in_an_empty_workspace_says_so(tmp_path):
    child = start(tmp_path, "resume")
    assert child.wait() == 2
    assert "can be resumed" in child.stderr


def test_a_fault_that_does_not_exist_is_refused(tmp_path):
    child = start(tmp_path, "run", str(RECIPES / "marl_baseline.yaml"), RUNNER_FAULTS="nowhere=kill")
    assert child.wait() == 2
    assert "'nowhere=kill' is not POINT=ACTION" in child.stderr
