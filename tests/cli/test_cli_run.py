import json
import os
import signal
import time

import mlflow
import pytest
from children import start
from running import RECIPES, TINY, forked, result_of, run_tiny

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def test_json_is_all_that_stdout_holds():
    data = result_of(run_tiny("marl_phase2", "--json"))
    assert data["schema_version"] == 1
    assert data["status"] == "FINISHED"
    assert data["stages"]["async_transfer"] == {
        "active": False,
        "reason": "nothing to do on a CPU: batches are where they are used",
        "notes": [],
    }
    assert data["stages"]["stacked_agents"]["active"] is True
    assert {"run_id", "tracking_uri", "run_dir", "lock", "metrics", "seconds"} <= data.keys()
    assert data["metrics"]["eval/success_rate"] >= 0
    assert os.path.exists(data["lock"])


def test_the_closing_table_says_what_how_fast_with_what_and_where():
    child = run_tiny("marl_phase1")
    assert child.returncode == 0
    for word in ("FINISHED", "success_rate", "ms per update", "forward_cache active", "runner compare", "runner ui"):
        assert word in child.stdout
    assert "\x1b[" not in child.stdout + child.stderr  # neither is a terminal


def test_what_the_command_line_says_of_a_run_is_listed_and_shown():
    result = result_of(run_tiny("marl_phase1", "--json", "--tag", "who=me", "--note", "for the talk", "seed=3"))
    listed = json.loads(forked("ls", "--json", "--where", "eval/success_rate>=0", "--recipe", "marl_*").stdout)["runs"]
    (run,) = listed
    assert (run["name"], run["tags"], run["note"]) == (result["run_name"], {"who": "me"}, "for the talk")
    assert (run["overrides"]["seed"], run["overrides"]["train.env_steps"]) == ("3", "120")
    assert run["headline"][0] == "eval/return"
    kept = {name: value for name, value in result["metrics"].items() if name.startswith("eval/")}
    assert kept.items() <= run["metrics"].items()
    tags = mlflow.MlflowClient(result["tracking_uri"]).get_run(result["run_id"]).data.tags
    assert tags["who"] == "me"
    assert tags["mlflow.note.content"].startswith("for the talk\n\n* **recipe**")
    shown = forked("show", run["name"])
    assert "tags who=me" in shown.stdout
    assert json.loads(forked("ls", "--json", "--where", "eval/success_rate>1").stdout)["runs"] == []


def test_a_tag_that_is_none_or_mlflows_own_is_refused():
    for tag in ("who", "=me", "mlflow.runName=mine"):
        child = forked("run", "marl_phase1", "--tag", tag)
        assert child.returncode == 2
        assert f"--tag '{tag}': should be NAME=VALUE" in child.stderr


def test_a_run_is_removed_and_refused_by_the_command_line(migrated_workspace):
    run = result_of(run_tiny("marl_phase1", "--json"))["run_name"]
    assert forked("rm").returncode == 2
    removed = forked("rm", run[-8:])
    assert removed.stdout == f"{run}: {migrated_workspace / 'trash' / run}; deleted in MLflow\n"
    assert f"MLFLOW_TRACKING_URI=sqlite:///{migrated_workspace / 'mlflow.db'} mlflow runs restore" in removed.stderr
    assert json.loads(forked("ls", "--json").stdout)["runs"] == []
    assert forked("rm", "--purge").stdout == f"{run}: deleted permanently\n"
    assert json.loads(forked("rm", "--purge", "--json").stdout) == {"schema_version": 1, "runs": [], "purged": []}


def test_a_lock_runs_again_with_the_same_digits():
    first = result_of(run_tiny("marl_phase1", "--json"))
    again = result_of(forked("run", first["lock"], "--json"))
    kept = ("train/", "eval/")
    assert {k: v for k, v in first["metrics"].items() if k.startswith(kept)} == {
        k: v for k, v in again["metrics"].items() if k.startswith(kept)
    }


def test_a_stage_without_what_it_requires_is_refused_where_it_was_asked_for():
    child = run_tiny("marl_phase2", "--set", "optimization.merged_critic_loss=off")
    assert child.returncode == 2
    assert "stacked_agents" in child.stderr
    assert "merged_critic_loss" in child.stderr
    assert "marl_phase2.yaml:" in child.stderr
    assert "Traceback" not in child.stderr


def test_phase_1_refuses_the_sequential_order_with_the_reason():
    child = run_tiny("marl_phase1", "--set", "model.update_order=sequential")
    assert child.returncode == 2
    assert "agents before it have just changed" in child.stderr
    assert "marl_phase1.yaml:" in child.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train.batch_size=5000", "train.batch_size: 5,000 exceeds the largest batch"),
        ("data.warmup=160", "data.warmup: 160 leaves no step to learn in"),
        ("train.updates=5", "train.env_steps: set either train.updates or train.env_steps, not both"),
        ("optimizer.actor.lr=.inf", "optimizer.actor.lr: should be a finite number"),
        ("optimizer.actor.betas=[0.9, 2.0]", "torch.optim.Adam refuses its settings: Invalid beta"),
        ("optimization.compile=on", "switch stacked_agents on"),
    ],
)
def test_what_would_train_nothing_or_crash_is_refused(setting, told):
    child = run_tiny("marl_phase1", "--set", setting)
    assert child.returncode == 2
    assert told in child.stderr
    assert "Traceback" not in child.stderr


def test_fp16_on_a_cpu_is_refused_at_its_line():
    child = run_tiny("marl_phase2", "--set", "optimization.amp.dtype=fp16")
    assert child.returncode == 2
    assert "90 times slower" in child.stderr


def test_an_unreachable_store_ends_with_code_5(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/missing/folder/x.db")
    (tmp_path / "missing").write_text("a file where a folder should be")
    child = run_tiny("marl_phase1")
    assert child.returncode == 5, child.stderr
    assert "Traceback" not in child.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_checkpoint_and_the_true_status(number, code, tmp_path, migrated_workspace):
    sets = [part for setting in (*TINY, "train.env_steps=1000000") for part in ("--set", setting)]
    child = start(tmp_path, "run", str(RECIPES / "marl_phase1.yaml"), *sets, "--json")
    deadline = time.monotonic() + 120
    while not list(migrated_workspace.glob("runs/*/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    child.send(number)
    assert child.wait(60) == code, child.stderr
    data = json.loads(child.stdout)
    assert data["status"] == "STOPPED"
    assert mlflow.MlflowClient(data["tracking_uri"]).get_run(data["run_id"]).info.status == "KILLED"
    assert list(migrated_workspace.glob("runs/*/checkpoints/step-*"))
