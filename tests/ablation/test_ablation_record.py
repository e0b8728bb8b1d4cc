"""What ``runner ls`` knows of an ablation, from its beginning to each of its ends."""

from contextlib import closing

import pytest
from ablations import analysed, case, entries, result

from runner.ablation.ablation_record import recorded
from runner.ablation.experiment import load_experiment
from runner.ablation.measurement_log import MeasurementLog
from runner.plugin.registry import Registry
from runner.system.errors import ExitCode, RunnerError
from runner.tracking import RunFolder, Workspace
from runner.tracking.listing import listing

FACTORS = {"stacked_agents": 3.0}


@pytest.fixture
def experiment():
    return load_experiment("marl_phase3", ["seed=3", "optimization.compile=off"], Registry())


def measured(experiment, act, place="ablations"):
    """The record after ``act`` has been given what takes the result, and the log."""
    folder = Workspace().root / place / "phases-00000001"
    with closing(MeasurementLog(folder, {})) as log, recorded(experiment, log, Workspace()) as take:
        act(take, log)
    return RunFolder(folder).record()


def test_while_it_measures_and_after_its_end(experiment):
    def act(take, log):
        (running,) = listing(Workspace())
        assert (running["kind"], running["status"], running["recipe"]) == ("ablation", "RUNNING", "marl_phase3")
        assert running["not_resumable"].endswith("is at it")
        log.entries += entries(case(), FACTORS)
        take(result(analysed(case(), FACTORS), run_id="a" * 32))

    record = measured(experiment, act)
    assert (record.status, record.run_id, record.step, record.goal) == ("FINISHED", "a" * 32, 12, 12)
    assert record.overrides == {"seed": "3", "optimization.compile": "off"}
    assert record.headline == ("all",)
    assert record.metrics["all"] == pytest.approx(3.0)
    assert record.seconds > 0


@pytest.mark.parametrize(
    ("error", "status"),
    [(RunnerError("no update"), "FAILED"), (ZeroDivisionError("oh"), "FAILED"), (KeyboardInterrupt(), "STOPPED")],
)
def test_an_ablation_that_ends_otherwise_says_how(experiment, error, status):
    def act(_take, _log):
        raise error

    with pytest.raises(type(error)):
        measured(experiment, act)
    (found,) = listing(Workspace())
    assert (found["status"], found["not_resumable"]) == (status, "the same command continues it")
    assert str(error) in found["reason"]


def test_an_interrupted_ablation_is_stopped(experiment):
    stopped = RunnerError("interrupted before two processes of each were measured")
    stopped.exit_code = ExitCode.INTERRUPTED

    def act(_take, _log):
        raise stopped

    with pytest.raises(RunnerError):
        measured(experiment, act)
    assert listing(Workspace())[0]["status"] == "STOPPED"
    interrupted = result(analysed(case(), FACTORS), interrupted=True)
    record = measured(experiment, lambda take, _log: take(interrupted))
    assert (record.status, record.run_id) == ("STOPPED", None)


def test_a_folder_of_ones_own_is_left_alone(experiment):
    assert measured(experiment, lambda _take, _log: None, place="elsewhere") is None
