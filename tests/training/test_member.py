"""Trainings on two processes, as torch's launcher starts them: results, signals, failures."""

import json
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from children import free_port, start
from interrupted import arguments, flat, learnt, same
from running import tiny
from toy_runs import TOYS, written

from runner.recipe.lock import locked_processes
from runner.system.errors import UsageError
from runner.training import checkpoint
from runner.training.group_steps import changed_count

PACED = str(Path(__file__).with_name("paced.py"))
SETS = (
    *("model.kind=paced", "train.updates=40", "train.ema=0.9", "train.checkpoint_every=5"),
    *("train.evaluate_every=20", "train.log_every=5", "optimizer.max_grad_norm=0.5"),
)


@contextmanager
def two(folder, *arguments, **variables):
    """Starts two processes like torch's launcher, and kills those that are left in the end."""
    port = str(free_port())
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    processes = [start(folder, *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **environment) for rank in (0, 1)]
    try:
        yield processes
    finally:
        for process in processes:
            if process.running:
                process.kill()


def command(folder, *sets):
    """The command line of the paced toy."""
    return [*written(folder, *SETS, *sets), "--plugin", PACED]


def wait_for_checkpoint(workspace, processes, earlier=()):
    """Returns the new run as soon as it has a checkpoint."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        manifests = workspace.glob("runs/*/checkpoints/step-*/manifest.json")
        runs = {path.parents[2] for path in manifests} - set(earlier)
        if runs:
            return runs.pop()
        assert all(process.running for process in processes), [process.stderr for process in processes]
        time.sleep(0.01)
    raise AssertionError("no checkpoint")


def record_of(run):
    return json.loads((run / "run.json").read_text())


def newest(run):
    return checkpoint.checkpoints(run / "checkpoints")[-1]


RESUME = ("--quiet", "--json", "--plugin", str(TOYS), "--plugin", PACED)


def train_and_stop(folder, workspace, *sets):
    """Trains to the end, and again until a signal; returns what the first printed and the folder of the second."""
    words = command(folder, *sets)
    with two(folder / "whole", *words) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    # The first process alone prints, and writes one run.
    assert (second.stdout, second.stderr, first.stderr) == ("", "", "")
    (run,) = workspace.glob("runs/*")
    assert record_of(run)["processes"] == 2
    assert yaml.safe_load((run / "recipe.lock.yaml").read_text())["system"]["processes"] == 2

    # A signal to one process stops both after the same update.
    with two(folder / "stopped", *words) as processes:
        wait_for_checkpoint(workspace, processes, [run])
        processes[1].send(signal.SIGTERM)
        assert [process.wait() for process in processes] == [143, 143], [each.stderr for each in processes]
    (stopped,) = set(workspace.glob("runs/*")) - {run}
    assert record_of(stopped)["status"] == "STOPPED"
    assert 0 < checkpoint.load(newest(stopped))["step"] < 40
    return first.data(), stopped


def test_two_processes_are_one_run_that_can_be_stopped_and_resumed(tmp_path, migrated_workspace):
    reference, stopped = train_and_stop(tmp_path, migrated_workspace)
    # The resumed run loses a process, and is resumed again.
    before = newest(stopped)
    with two(tmp_path / "killed", "resume", stopped.name, *RESUME) as processes:
        while newest(stopped) <= before:
            assert processes[0].running, processes[0].stderr
            time.sleep(0.005)
        processes[1].send(signal.SIGKILL)
        assert processes[0].wait() == 1
    assert processes[0].stderr.count("process 1 of 2") == 1
    assert "has ended without" in processes[0].stderr
    assert record_of(stopped)["status"] == "FAILED"
    assert checkpoint.load(newest(stopped))["step"] < 40
    with two(tmp_path / "resumed", "resume", stopped.name, *RESUME) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    same(learnt(first.data()), learnt(reference))


def test_two_processes_with_parts_of_parameters_are_stopped_and_resumed(tmp_path, migrated_workspace):
    reference, stopped = train_and_stop(tmp_path, migrated_workspace, "optimization.fsdp=on")
    with two(tmp_path / "resumed", "resume", stopped.name, *RESUME) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    same(learnt(first.data()), learnt(reference))


def continued(folder, run, *arguments):
    """Resumes a run of the paced toy, and returns what it prints as JSON."""
    process = start(folder, "resume", run, *RESUME, *arguments)
    assert process.wait() == 0, process.stderr
    return process


def test_another_number_of_processes_continues_a_training_on_a_dataset(tmp_path, migrated_workspace):
    words = command(tmp_path)
    reference = start(tmp_path / "reference", *words).data()
    assert locked_processes(Path(reference["lock"])) == 1
    earlier = set(migrated_workspace.glob("runs/*"))
    process = start(tmp_path / "stopped", *words)
    folder = wait_for_checkpoint(migrated_workspace, [process], earlier)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.stderr
    remark = "number of processes: 2 instead of 1, so sums are rounded in another order"
    resumed = continued(tmp_path / "resumed", folder.name, "--nproc", "2")
    assert remark in resumed.stderr
    data = resumed.data()
    for name in ("train/loss", "eval/loss"):
        assert data["metrics"][name] == pytest.approx(reference["metrics"][name], rel=1e-4)
    assert record_of(folder)["processes"] == 2
    assert locked_processes(folder / "recipe.lock.yaml") == 2

    # A simulator has a state in each process.
    for count in (1, 3):
        with pytest.raises(UsageError, match=f"was trained by 2 processes, and this would be {count}: 'uav_path"):
            changed_count(tiny("marl_baseline"), folder / "recipe.lock.yaml", count)


def test_a_simulator_of_two_processes_is_killed_and_resumed(tmp_path, migrated_workspace):
    """The first process dies inside of its second save; the checkpoint before has both simulators."""
    sets = ("data.envs=3", "data.replay.kind=prioritized", "train.batch_size=5")
    words = [word for word in arguments("marl_phase2", *sets) if word != "--resume"]
    with two(tmp_path / "whole", *words) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", "")
    runs = set(migrated_workspace.glob("runs/*"))
    with two(tmp_path / "killed", *words, RUNNER_FAULTS="checkpoint.synced=kill@2") as processes:
        assert processes[0].wait() == -signal.SIGKILL, processes[0].stderr
        processes[1].wait()
    (killed,) = set(migrated_workspace.glob("runs/*")) - runs
    (path,) = checkpoint.checkpoints(killed / "checkpoints")
    state = checkpoint.load(path)
    (part,) = state["processes"]
    rings = [source["replay"]["rows"].written for source in (state["pipeline"]["source"], part["source"])]
    # Environments are divided 1 to 2.
    assert rings[1] == 2 * rings[0] > 0
    with two(tmp_path / "resumed", "resume", killed.name, "--quiet", "--json") as resumed:
        assert [process.wait() for process in resumed] == [0, 0], [process.stderr for process in resumed]
    same(learnt(resumed[0].data()), learnt(first.data()))
    same(*[[flat(checkpoint.load(newest(run))["processes"])] for run in (killed, *runs)])


def test_an_error_of_all_processes_is_printed_by_the_first(tmp_path, migrated_workspace):
    with two(tmp_path / "diverged", *command(tmp_path, "optimizer.lr=1e30", "optimizer.max_grad_norm=null")) as members:
        assert [member.wait() for member in members] == [6, 6]
    first, second = members
    assert second.stderr == ""
    assert first.stderr.count("error: ") == 1
    (run,) = migrated_workspace.glob("runs/*")
    assert record_of(run)["status"] == "FAILED"
    assert (run / "diagnosis.json").exists()


def test_the_message_of_a_failing_process_is_printed_once(tmp_path, migrated_workspace):
    with two(tmp_path / "failed", *command(tmp_path, "model.fails_at=7")) as (first, second):
        assert (first.wait(), second.wait()) == (1, 1)
    assert second.stderr.count("error: ") == 1
    assert "ValueError: out of luck in one process" in second.stderr
    assert "paced.py" in second.stderr
    assert first.stderr == ""
    (run,) = migrated_workspace.glob("runs/*")
    record = record_of(run)
    assert record["status"] == "FAILED"
    assert record["reason"].startswith("process 1: ")
    assert "out of luck" in record["reason"]


def test_all_end_when_one_hangs(tmp_path, migrated_workspace):
    with two(tmp_path / "lost", *command(tmp_path, "train.stall_s=2", "train.updates=4000")) as processes:
        run = wait_for_checkpoint(migrated_workspace, processes)
        processes[1].send(signal.SIGSTOP)
        sent = time.monotonic()
        assert processes[0].wait() == 1
        assert time.monotonic() - sent < 15
    assert processes[0].stderr.count("process 1 of 2") == 1
    assert "not answered for 2 s" in processes[0].stderr
    assert record_of(run)["status"] == "FAILED"
    assert checkpoint.checkpoints(run / "checkpoints")


def test_the_first_process_selects_the_batch_size_for_both(tmp_path, migrated_workspace):
    tuned = ("optimization.batch_autotune={largest: 32, gain: 0}", "train.batch_size=16")
    words = written(tmp_path, "model.kind=paced", "train.epochs=2", "train.evaluate_every=2", *tuned)
    with two(tmp_path / "tuned", *words, "--plugin", PACED) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    (run,) = migrated_workspace.glob("runs/*")
    lock = yaml.safe_load((run / "recipe.lock.yaml").read_text())
    # An update waits as long for more samples; on a busy machine the largest size may look slower.
    assert lock["tuning"]["choices"]["batch_autotune"]["batch_size"] > 16
