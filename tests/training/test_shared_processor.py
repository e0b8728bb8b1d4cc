"""Trainings beside other programs: the load is injected, the digits are real."""

import os
import signal
from pathlib import Path

import pytest
import torch
from run_folders import run_folder
from running import train_here

from runner.cli.diagnosis import examine
from runner.plugin.registry import Registry
from runner.recipe.loader import load as load_recipe
from runner.recipe.lock import read_lock
from runner.system import processor
from runner.system.contention import Contention
from runner.system.openmp import WaitControl
from runner.system.processes import Owner, _born
from runner.system.processor import THREAD_VARIABLES
from runner.tracking import Workspace
from runner.tracking.lookup import computing
from runner.tracking.workspace import RunFolder
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.run import run

pytestmark = pytest.mark.usefixtures("migrated_workspace")
BRIEF = ("train.batch_size=512",)
"""Few updates: threads that spin take as much of the processor as those that compute."""
QUIET = Contention(0.0, 0.0)
LOADED = Contention(0.7, 1.5)


@pytest.fixture
def load(monkeypatch):
    """Makes every sample of a training another one, without a variable of the tests."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setattr(processor, "SAMPLE_SECONDS", 0.005)
    switches = []
    for name in ("sleep", "spin"):
        method = getattr(WaitControl, name)
        monkeypatch.setattr(
            WaitControl, name, lambda self, name=name, method=method: (switches.append(name), method(self))[1]
        )

    def set_load(at_start, later):
        switches.clear()
        monkeypatch.setattr(processor.SINCE_START, "read", lambda: at_start)
        monkeypatch.setattr(processor.ContentionMeter, "read", lambda _: later)
        return switches

    return set_load


def learned(result):
    return {name: repr(value) for name, value in result.metrics.items() if name.startswith(("train/", "eval/"))}


@pytest.fixture
def two_threads():
    """Torch's number of threads is two, until the end of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stopped_after(evaluate):
    """An evaluation after which a signal stops the training."""

    def evaluate_and_stop(loop):
        evaluate(loop)
        loop.stop.received = signal.SIGTERM

    return evaluate_and_stop


def noting_threads(train, used):
    """A training that notes how many threads it has."""

    def note_and_train(loop):
        used.append(torch.get_num_threads())
        train(loop)

    return note_and_train


def test_load_that_begins_during_a_training_changes_how_threads_wait_and_no_digit(load, caplog):
    load(QUIET, QUIET)
    quiet = train_here("mlp", *BRIEF, "system.threads=2")
    switches = load(QUIET, LOADED)
    loaded = train_here("mlp", *BRIEF, "system.threads=2")
    assert "sleep" in switches
    assert learned(loaded) == learned(quiet)
    assert loaded.status == "FINISHED"
    reports = [record.message for record in caplog.records if "threads sleep" in record.message]
    assert len(reports) == 1
    assert read_lock(Path(loaded.lock))["system"]["wait"] == "active"


@pytest.mark.parametrize("wait", ["auto", "active", "passive"])
def test_the_lock_says_how_a_training_on_a_loaded_machine_began(load, wait):
    switches = load(LOADED, LOADED)
    result = train_here("mlp", *BRIEF, "system.threads=2", f"system.wait={wait}")
    choice = read_lock(Path(result.lock))["system"]
    assert choice["threads"] == 2
    assert choice["wait"] == ("active" if wait == "active" else "passive")
    assert choice["wait_reason"].startswith("other programs use 1.5" if wait == "auto" else f"system.wait={wait}")
    assert ("sleep" in switches) == (wait != "active")


def test_a_resumed_run_keeps_its_threads_and_may_wait_in_another_way(load, monkeypatch, two_threads):
    load(QUIET, QUIET)
    whole = train_here("mlp", *BRIEF)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "evaluate", stopped_after(Loop.evaluate))
        stopped = train_here("mlp", *BRIEF)
    assert stopped.status == "STOPPED"
    torch.set_num_threads(1)
    load(LOADED, LOADED)
    registry = Registry()
    recipe = load_recipe(Path(stopped.lock), [], registry)
    with monkeypatch.context() as patch:
        used = []
        patch.setattr(Loop, "run", noting_threads(Loop.run, used))
        resumed = run(recipe, registry, Workspace(), NoOutput(), RunFolder(Path(stopped.run_dir)))
    assert used == [2]
    assert resumed.status == "FINISHED"
    assert learned(resumed) == learned(whole)
    assert "wait passive" in (Path(resumed.run_dir) / "run.log").read_text()


def test_other_runs_of_the_workspace_are_counted():
    """Those of this machine that compute, without this process."""
    elsewhere = Owner(pid=1, host="elsewhere", boot_id="another")
    parent = Owner.this_process().model_copy(update={"pid": os.getppid(), "born": _born(os.getppid())})
    dead = parent.model_copy(update={"born": 1.0})
    run_folder()
    run_folder(owner=elsewhere)
    run_folder(owner=dead)
    run_folder(owner=parent, status="FINISHED")
    assert computing(Workspace()) == 0
    run_folder(owner=parent)
    assert computing(Workspace()) == 1


@pytest.mark.parametrize(
    ("contention", "status", "found"),
    [
        (QUIET, "ok", "no other program uses the cores"),
        (LOADED, "warn", "other programs use 1.5 of"),
        (Contention(0.9, 0.1), "ok", "no other program uses the cores"),
    ],
)
def test_doctor_reports_a_loaded_machine(load, contention, status, found):
    load(contention, contention)
    check = {check.name: check for check in examine(Workspace(), Registry())}["load"]
    assert check.status == status
    assert check.found.startswith(found)


def test_doctor_names_the_variable_that_makes_threads_spin(load, monkeypatch):
    load(LOADED, LOADED)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    check = {check.name: check for check in examine(Workspace(), Registry())}["load"]
    assert check.remedy.startswith("unset OMP_WAIT_POLICY")
