"""Code that does not return: a signal ends it, and so does a limit; without either it is reported."""

import logging
import signal
import time
from pathlib import Path

import pytest
from children import running, start
from toy_runs import TOYS, written

from runner.tracking import Workspace
from runner.tracking.lookup import folders
from runner.training import stall_report
from runner.training.outputs import NoOutput
from runner.training.stall_report import StallReport

ENDLESS = Path(__file__).with_name("endless.py")
LENGTH = ("train.updates=20", "train.checkpoint_every=4", "train.evaluate_every=10", "train.log_every=4")


def command(folder, where, how, *sets):
    begun = folder / "begun"
    model = f"model={{kind: toy_endless, where: {where}, how: {how}, begun: {begun}}}"
    return [*written(folder, *LENGTH, model, *sets), "--plugin", str(ENDLESS)], begun


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(
    ("where", "how", "number", "code"),
    [
        ("loss", "loop", signal.SIGTERM, 143),
        ("loss", "c", signal.SIGINT, 130),
        ("evaluation", "deaf", signal.SIGHUP, 129),
        ("evaluation", "loop", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_a_run_whose_code_does_not_return_and_it_is_resumed(tmp_path, where, how, number, code):
    words, begun = command(tmp_path, where, how)
    with running(start(tmp_path, *words)) as child:
        while not begun.exists():
            assert child.running, child.stderr
            time.sleep(0.02)
        child.send(number)
        assert child.wait() == code, child.stderr
    assert "Traceback" not in child.stderr
    assert "endless.py" in child.stderr
    (folder,) = folders(Workspace().runs)
    assert folder.record().status == "STOPPED"
    assert folder.last_checkpoint == 8
    sets = ["--set", "model.where=nowhere", "--allow-drift", "--plugin", str(TOYS), "--plugin", str(ENDLESS)]
    resumed = start(tmp_path, "resume", folder.name, "--json", *sets).data()
    assert (resumed["status"], resumed["resumed_at"]) == ("FINISHED", 8)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize(("where", "how"), [("loss", "loop"), ("evaluation", "c"), ("loss", "deaf")])
def test_a_limit_ends_a_run_whose_code_does_not_return(tmp_path, where, how):
    words, _ = command(tmp_path, where, how, "train.stall_s=3")
    child = start(tmp_path, *words)
    assert child.wait() == 1
    assert "does not return" in child.stderr or "no progress for more than train.stall_s (3 s)" in child.stderr
    assert "stay in " in child.stderr
    (folder,) = folders(Workspace().runs)
    assert folder.record().status == "FAILED"


def test_what_does_not_return_is_reported_with_phase_function_and_time(monkeypatch, caplog):
    monkeypatch.setattr(stall_report, "REPORT_SECONDS", 0.2)
    monkeypatch.setattr(stall_report, "_LOOK_SECONDS", 0.02)
    with caplog.at_level(logging.WARNING), StallReport(NoOutput(), None) as watch, watch.phase("evaluating"):
        stay_a_while(caplog)
    assert caplog.messages[0].startswith("evaluating, at stay_a_while in ")
    assert caplog.messages[0].endswith(": no progress for 0 s; train.stall_s=SECONDS sets a limit")


def stay_a_while(caplog):
    records = caplog.handler.records
    while not records:
        time.sleep(0.01)
