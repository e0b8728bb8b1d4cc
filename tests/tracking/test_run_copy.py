"""Second copies of runs: what is copied, when, and how another machine resumes from it."""

import json
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from children import running, start
from interrupted import learnt, same, train
from run_folders import run_folder
from running import forked
from toy_runs import toy, written

from runner.system.errors import StorageError, UsageError
from runner.system.processes import ATTEMPT, JOB, Owner
from runner.tracking import Workspace
from runner.tracking.run_copy import RunCopy, find_copy, open_storage, restore

ROOT = "memory://copies"
ELSEWHERE = Owner(pid=1, host="elsewhere", boot_id="another", job="slurm-7", attempt="0")


@pytest.fixture(autouse=True)
def memory():
    """An empty storage in memory."""
    storage = fsspec.filesystem("memory")
    storage.store.clear()
    storage.pseudo_dirs[:] = [""]
    yield storage
    storage.store.clear()


def put_checkpoint(folder, step, **texts):
    """Writes a checkpoint of files with these texts."""
    path = folder / "checkpoints" / f"step-{step:012d}"
    path.mkdir(parents=True)
    for name, text in texts.items():
        (path / name).write_text(text)
    manifest = {"done": step, "sha256": {name: f"digest of {text}" for name, text in texts.items()}}
    (path / "manifest.json").write_text(json.dumps(manifest) + "\nseal\n")


def copied(memory):
    return {path.removeprefix("/copies/"): data.getvalue().decode() for path, data in memory.store.items()}


def test_complete_checkpoints_are_copied_once_and_removed_ones_disappear(tmp_path, memory, monkeypatch):
    run = tmp_path / "toy-1"
    put_checkpoint(run, 1, rows="a", state="b")
    (run / "checkpoints" / ".step-000000000002.partial").mkdir()
    (run / "run.json").write_text("first")
    sent = []
    put_file = type(memory).put_file

    def put(self, source, target):
        sent.append(Path(source).name)
        put_file(self, source, target)

    monkeypatch.setattr(type(memory), "put_file", put)
    copy = RunCopy(ROOT, run)
    copy.update()
    first = "toy-1/checkpoints/step-000000000001"
    assert copied(memory).keys() == {f"{first}/rows", f"{first}/state", f"{first}/manifest.json", "toy-1/run.json"}
    # The manifest is the last file of a checkpoint, and the record the last of all.
    assert sent == ["rows", "state", "manifest.json", "run.json"]
    copy.update()
    assert len(sent) == 4

    # Files that checkpoints share are not sent again.
    put_checkpoint(run, 3, rows="a", state="c")
    shutil.rmtree(run / "checkpoints" / "step-000000000001")
    copy.update()
    third = "toy-1/checkpoints/step-000000000003"
    assert sent[4:] == ["state", "manifest.json", "run.json"]
    assert copied(memory) | {"toy-1/run.json": ""} == {
        f"{third}/rows": "a",
        f"{third}/state": "c",
        f"{third}/manifest.json": copied(memory)[f"{third}/manifest.json"],
        "toy-1/run.json": "",
    }
    (run / "run.json").write_text("last")
    copy.close()
    assert copied(memory)["toy-1/run.json"] == "last"


def test_a_storage_that_fails_is_tried_again(tmp_path, memory, monkeypatch):
    run = tmp_path / "toy-1"
    put_checkpoint(run, 1, state="b")
    put_file = type(memory).put_file

    def refuse(self, *rest):
        raise OSError("no space")

    copy = RunCopy(ROOT, run)
    monkeypatch.setattr(type(memory), "put_file", refuse)
    with pytest.raises(OSError, match="no space"):
        copy.update()
    monkeypatch.setattr(type(memory), "put_file", put_file)
    copy.update()
    assert "toy-1/checkpoints/step-000000000001/manifest.json" in copied(memory)


@pytest.mark.parametrize("url", ["nothing://x", "s3://bucket/runs"])
def test_a_storage_without_a_driver_is_one_line(url):
    if url.startswith("s3") and find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(UsageError, match=rf"^tracking.second_copy: {url}: "):
        open_storage(url)


def test_another_machine_finds_the_newest_unfinished_run(tmp_path, memory, monkeypatch, migrated_workspace):
    """A run that another machine may be training is passed over, unless that is an earlier attempt of this task."""
    now = time.time()
    folder = run_folder(owner=ELSEWHERE, heartbeat=now, digest="a")
    (folder.path / "recipe.lock.yaml").touch()
    put_checkpoint(folder.path, 1, state="b")
    RunCopy(ROOT, folder.path).update()
    assert find_copy(ROOT, "a") is None
    assert find_copy(ROOT, "b", takeover=True) is None
    url = f"{ROOT}/{folder.name}"
    assert find_copy(ROOT, "a", takeover=True) == url
    monkeypatch.setenv(JOB, "slurm-7")
    monkeypatch.setenv(ATTEMPT, "1")
    assert find_copy(ROOT, "a") == url
    assert find_copy("memory://nothing", "a") is None

    with pytest.raises(UsageError, match="is in this workspace"):
        restore(url, Workspace())
    shutil.rmtree(folder.path)
    memory.pipe_file(f"/copies/{folder.name}/checkpoints/step-000000000001/..", b"escapes")
    path = restore(url, Workspace())
    assert (path / "checkpoints" / "step-000000000001" / "state").read_text() == "b"
    assert sorted(item.name for item in path.iterdir()) == [
        "checkpoints",
        "recipe.lock.yaml",
        "run.json",
        "spool.jsonl",
    ]
    with pytest.raises(UsageError, match="is no copy of a run"):
        restore(f"{ROOT}/nothing", Workspace())


def test_the_url_is_checked_with_the_recipe(tmp_path):
    with pytest.raises(UsageError, match=r"tracking.second_copy: "):
        toy(tmp_path, "tracking.second_copy=/mnt/runs")


@pytest.mark.long
def test_a_lost_machine_is_replaced_by_another(tmp_path, migrated_workspace, monkeypatch):
    """The second workspace has nothing but MLflow's server, here a database, and the copy."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{migrated_workspace / 'mlflow.db'}")
    sets = ("train.updates=40", "train.checkpoint_every=5", "train.log_every=5")
    pace = ("--plugin", str(Path(__file__).parents[1] / "training" / "paced.py"), "model.kind=paced")
    reference = learnt(train(tmp_path, [*written(tmp_path, *sets), *pace]))
    copies = tmp_path / "copies"
    command = [*written(tmp_path, *sets, f"tracking.second_copy=file://{copies}"), *pace, "--resume"]
    child = start(tmp_path, *command)
    with running(child):
        while not list(copies.glob("*/run.json")):
            assert child.running, child.stderr
            time.sleep(0.02)
        child.kill()
    assert child.wait() == -signal.SIGKILL
    # The machine is lost with its workspace.
    shutil.rmtree(migrated_workspace / "runs")
    other = tmp_path / "other"
    result = train(tmp_path, command, RUNNER_WORKSPACE=str(other))
    assert Path(result["run_dir"]).is_relative_to(other)
    same(learnt(result), reference)
    assert json.loads((copies / Path(result["run_dir"]).name / "run.json").read_text())["status"] == "FINISHED"


def test_resume_refuses_a_run_whose_metrics_are_elsewhere(tmp_path, memory, migrated_workspace):
    copies = tmp_path / "copies"
    folder = run_folder(run_id="0" * 32)
    put_checkpoint(folder.path, 1, state="b")
    RunCopy(f"file://{copies}", folder.path).update()
    shutil.rmtree(folder.path)
    done = forked("resume", f"file://{copies}/{folder.name}")
    assert done.returncode == 2
    assert "its metrics are in the MLflow store of another machine" in done.stderr


def test_a_storage_that_cannot_be_read_is_one_line(memory, migrated_workspace, monkeypatch):
    def refuse(self, *rest):
        raise PermissionError("no access")

    memory.pipe_file("/copies/toy-1/run.json", b"{}")
    monkeypatch.setattr(type(memory), "cat_file", refuse)
    with pytest.raises(StorageError, match=rf"{ROOT}/toy-1 cannot be copied to .*no access"):
        restore(f"{ROOT}/toy-1", Workspace())
    with pytest.raises(StorageError, match=rf"{ROOT} cannot be read: no access"):
        find_copy(ROOT, "a")
