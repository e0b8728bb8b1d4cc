"""The end of a command on several processes: its exit code, and what is printed here."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from signal import Signals
from types import SimpleNamespace

import psutil
import pytest
from children import free_port, start
from toy_runs import written

from runner.distributed.launch import Nodes, _exit_code, _warning_when_alone, launch
from runner.distributed.membership import EXIT_FILE, STARTED_FILE, record_exit
from runner.distributed.process_group import FAILURE_FILE, LAUNCH_FOLDER, PeerFailure, ProcessGroup, record_failure
from runner.training import checkpoint

ENDED = "process 1 of 2 has ended"
PACED = Path(__file__).parents[1] / "training" / "paced.py"
SETS = ("model.kind=paced", "train.updates=60", "train.checkpoint_every=5", "train.preemptible=true")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "runner")


def test_the_launcher_of_torch_starts_the_processes(monkeypatch, capfd):
    """The processes find each other, and print the error of all of them once."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    started = []
    monkeypatch.setattr("runner.distributed.launch._exit_code", lambda folder, *rest: _looking(folder, started, *rest))
    assert launch(2, ["recipes"]) == 2
    assert started == [True]
    output = capfd.readouterr()
    assert output.err == "error: 'recipes' is a command for one process; several can: resume, run, verify\n"
    assert output.out == ""
    assert not {"RUNNER_LAUNCH", "RUNNER_THREADS"} & os.environ.keys()


def _looking(folder, started, *rest):
    """Notes whether a process has said that it has started, before the exit code is determined."""
    started.append((folder / STARTED_FILE).exists())
    return _exit_code(folder, *rest)


def failing(**codes):
    return {int(name[1:]): SimpleNamespace(exitcode=code) for name, code in codes.items()}


@pytest.mark.parametrize(
    ("failure", "ending", "failures", "received", "code", "printed"),
    [
        (None, 0, {}, None, 0, ""),
        (None, 143, failing(r0=143, r1=143), None, 143, ""),
        (None, 75, {}, Signals.SIGTERM, 75, ""),
        (None, None, {}, Signals.SIGTERM, 143, ""),
        (None, None, {}, Signals.SIGINT, 130, ""),
        (PeerFailure(1, 6, "the loss is NaN"), None, failing(r0=6, r1=6), None, 6, ""),
        (PeerFailure(0, 1, ENDED, is_missing=True), None, failing(r1=-9), None, 1, "process 1 was killed by SIGKILL"),
        (PeerFailure(0, 1, ENDED, is_missing=True), None, failing(r0=1), None, 1, ENDED),
        (PeerFailure(0, 75, ENDED, is_missing=True), None, failing(r0=75), None, 75, ENDED),
        (None, None, failing(r0=-11), None, 1, "process 0 was killed by SIGSEGV"),
        (None, None, failing(r0=3), None, 1, ""),
    ],
)
def test_an_ending_has_one_exit_code_and_at_most_one_message(
    tmp_path, capsys, failure, ending, failures, received, code, printed
):
    if failure is not None:
        (tmp_path / FAILURE_FILE).write_text(json.dumps(asdict(failure)))
    if ending is not None:
        (tmp_path / EXIT_FILE).write_text(str(ending))
    assert _exit_code(tmp_path, failures, received) == code
    assert capsys.readouterr().err.strip() == printed


def test_a_killed_process_is_named_whatever_the_others_do(tmp_path, capsys):
    for killed, count, number in itertools.product(range(4), (2, 3, 4), (6, 9, 11, 15)):
        if killed >= count:
            continue
        failures = {rank: SimpleNamespace(exitcode=1) for rank in range(count)}
        failures[killed] = SimpleNamespace(exitcode=-number)
        assert _exit_code(tmp_path, failures, None) == 1
        assert capsys.readouterr().err == f"process {killed} was killed by {Signals(number).name}\n"


def test_a_failure_and_an_exit_code_are_left_to_the_launcher_of_each_machine(tmp_path, monkeypatch):
    failure = PeerFailure(0, 6, "the loss is NaN")
    record_failure(failure)
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    record_failure(failure)
    record_failure(PeerFailure(1, 1, ENDED))
    assert json.loads((tmp_path / FAILURE_FILE).read_text()) == asdict(failure)
    for rank, local_rank, code in ((2, 0, 75), (3, 1, 0)):
        record_exit(SimpleNamespace(rank=rank, local_rank=local_rank), code)
    assert (tmp_path / EXIT_FILE).read_text() == "75"


@pytest.mark.parametrize(("missing", "code"), [([1], 75), ([0, 1], 75), ([5], 75), ([2], 1), ([3], 1), ([0, 3], 1)])
def test_only_a_machine_that_is_lost_is_reason_for_another_attempt(missing, code):
    """Ranks 2 and 3 are on this machine, of 6 on three machines."""
    group = ProcessGroup(None, rank=3, count=6, local_rank=1, local_count=2)
    error = group._missing(missing, "gone")
    assert error.exit_code == code
    assert str(error) == ("gone; its machine may be lost" if code == 75 else "gone")


class Machines:
    """Two launchers of this machine that find each other at a port, as those of two machines do."""

    def __init__(self, folder, workspace):
        self.folder = folder
        self.workspace = workspace
        self.words = [*written(folder, *SETS), "--plugin", str(PACED), "--resume"]
        self.launchers = []

    def start(self):
        """The launchers are copies of a process; the processes that they start are not."""
        options = ("--nodes", "2", f"--rendezvous=127.0.0.1:{free_port()}")
        self.launchers = [start(self.folder, *self.words, *options, PYTHONSAFEPATH="1") for _ in range(2)]

    def end_codes(self):
        return [launcher.wait() for launcher in self.launchers]

    def wait_for_checkpoint(self):
        """Returns the only run as soon as it has a checkpoint."""
        while not list(self.workspace.glob("runs/*/checkpoints/step-*/manifest.json")):
            assert all(launcher.running for launcher in self.launchers)
            time.sleep(0.02)
        (run,) = self.workspace.glob("runs/*")
        return run


@pytest.fixture
def machines(tmp_path, migrated_workspace):
    pair = Machines(tmp_path, migrated_workspace)
    yield pair
    for launcher in pair.launchers:
        launcher.kill()


def stop_one(machines, run):
    """A signal to one machine stops both after the same update."""
    machines.launchers[1].send(Signals.SIGTERM)
    assert machines.end_codes() == [75, 75]
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["processes"]) == ("PREEMPTED", 2)
    assert 0 < checkpoint.load(checkpoint.checkpoints(run / "checkpoints")[-1])["step"] < 60


def lose_one(machines, run):
    """A machine that is lost ends the command of the other one, which is repeated."""
    lost = psutil.Process(machines.launchers[1].process.pid)
    for process in (*lost.children(recursive=True), lost):
        process.kill()
    assert machines.end_codes() == [75, -9]
    assert "its machine may be lost" in machines.launchers[0].stderr
    machines.start()
    assert machines.end_codes() == [0, 0], [launcher.stderr for launcher in machines.launchers]
    assert list(machines.workspace.glob("runs/*")) == [run]
    assert json.loads((run / "run.json").read_text())["status"] == "FINISHED"
    outputs = [launcher.stdout for launcher in machines.launchers]
    assert "".join(outputs).count('"schema_version"') == 1


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("end", [stop_one, lose_one])
def test_two_machines_are_one_run(end, machines):
    machines.start()
    end(machines, machines.wait_for_checkpoint())


@pytest.mark.long
def test_the_command_of_torch_starts_the_processes_of_a_training(tmp_path, migrated_workspace):
    words = written(tmp_path, "train.updates=4", "model.dropout=0")
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    ended = subprocess.run([*TORCHRUN, *words], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (run,) = migrated_workspace.glob("runs/*")
    assert json.loads(ended.stdout)["run_dir"] == str(run)
    assert json.loads((run / "run.json").read_text())["processes"] == 2


@pytest.mark.parametrize("has_started", [False, True])
def test_machines_that_do_not_find_each_other_are_told_what_to_look_at(tmp_path, monkeypatch, capsys, has_started):
    monkeypatch.setenv(LAUNCH_FOLDER, str(tmp_path))
    monkeypatch.setattr("runner.distributed.launch._PATIENCE_SECONDS", 0.0)
    if has_started:
        (tmp_path / STARTED_FILE).touch()
    with _warning_when_alone(Nodes(3, "first-host:29500")):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
    warning = "--rendezvous first-host:29500: still waiting for 3 machines; start this command on each of them"
    output = capsys.readouterr().err
    assert output == "" if has_started else output.startswith(warning)
