import math
import threading
from typing import get_args

import pytest
from mlflow.exceptions import MlflowException
from outages import records
from run_folders import recipe

from runner.system import faults, secrets
from runner.system.errors import StorageError
from runner.system.secrets import MASK
from runner.tracking import RunFolder, Workspace
from runner.tracking.keys import mlflow_key
from runner.tracking.record import Status
from runner.tracking.run_copy import RunCopy
from runner.tracking.store import STATUS, Store
from runner.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("migrated_workspace")


def opened(tags=None, **settings):
    return Tracker.open(Workspace(), recipe(**settings), tags or {})


def run_of(tracker):
    return Store(Workspace()).client.get_run(tracker.run_id)


def test_a_run_is_recorded_whole():
    tracker = opened({"stages": "forward_cache"}, model={"kind": "masac"}, seed=42)
    lock = tracker.run_dir / "recipe.lock.yaml"
    lock.write_text("seed: 42")
    tracker.artifact(lock)
    for step in range(5):
        tracker.log({"train/loss": 1 / (step + 1), "train/return": step}, step)
    tracker.tag("stages", "none")
    assert tracker.close("FINISHED")

    run = run_of(tracker)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == tracker.run_name == tracker.run_dir.name
    assert tracker.run_name == f"marl-{tracker.run_id[:8]}"
    assert run.data.params == {"model.kind": "masac", "seed": "42"}
    assert run.data.metrics == {"train/loss": 0.2, "train/return": 4.0}
    assert run.data.tags["stages"] == "none"
    assert run.data.tags["run_dir"] == str(tracker.run_dir)
    assert run.data.tags["mlflow.user"]
    assert (
        Workspace().artifacts / "tests" / tracker.run_id / "artifacts" / "recipe.lock.yaml"
    ).read_text() == "seed: 42"


@pytest.mark.parametrize("status", get_args(Status))
def test_mlflow_has_the_final_status_and_a_tag_tells_stopped_from_killed(status):
    tracker = opened()
    assert run_of(tracker).info.status == "RUNNING"
    tracker.close(status)
    run = run_of(tracker)
    assert run.info.status == ("KILLED" if status in ("STOPPED", "PREEMPTED") else status)
    assert run.data.tags[STATUS] == status


def test_what_is_logged_is_in_the_spool_at_once_with_its_time():
    tracker = opened()
    tracker.log({"loss": 0.5}, 7)
    last = records(tracker.run_dir)[-1]
    assert (last["step"], last["metrics"]) == (7, {"loss": 0.5})
    tracker.close("FINISHED")
    (point,) = Store(Workspace()).client.get_metric_history(tracker.run_id, "loss")
    assert (point.step, point.timestamp) == (7, last["t"])


def test_numbers_that_are_not_finite_are_kept_and_named():
    tracker = opened()
    tracker.log({"loss": math.nan, "error": math.inf}, 3)
    tracker.log({"loss": math.nan, "error": 1.0}, 4)
    tracker.close("FAILED")
    assert {"loss": "nan", "error": "inf"} in [record.get("metrics") for record in records(tracker.run_dir)]
    data = run_of(tracker).data
    assert data.tags["not_finite.loss"] == "nan at step 3"
    assert data.tags["not_finite.error"] == "inf at step 3"
    assert math.isnan(data.metrics["loss"])
    assert data.metrics["error"] == 1.0


def test_names_that_mlflow_refuses_are_mended():
    tracker = opened()
    tracker.log({"accuracy of <cat>!": 1.0}, 1)
    tracker.close("FINISHED")
    assert run_of(tracker).data.metrics == {mlflow_key("accuracy of <cat>!"): 1.0}


def test_the_machine_is_sampled_at_the_start_and_at_the_end():
    tracker = opened(system_metrics=True)
    tracker.log({"loss": 1.0}, 100)
    tracker.close("FINISHED")
    samples = [
        record["step"]
        for record in records(tracker.run_dir)
        if "system/system_memory_usage_percentage" in record.get("metrics", {})
    ]
    assert samples[0] in (0, 100)
    assert samples[-1] == 100
    assert run_of(tracker).data.metrics["system/process_memory_usage_megabytes"] > 1


def test_training_does_not_wait_for_a_store_that_hangs(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(Store, "send", lambda *_: released.wait(60))
    tracker = opened()
    for step in range(100):
        tracker.log({"loss": 1.0}, step)
    assert len(records(tracker.run_dir)) >= 100
    released.set()
    assert tracker.close("FINISHED")


def test_what_cannot_be_delivered_stays_in_the_spool_and_is_reported(monkeypatch, caplog):
    def refuse(*_):
        raise MlflowException("connection refused")

    monkeypatch.setattr(Store, "send", refuse)
    tracker = opened()
    tracker.log({"loss": 1.0}, 1)
    assert not tracker.close("FINISHED", patience=0)
    assert records(tracker.run_dir)[-1]["status"] == "FINISHED"
    assert "spool.jsonl" in caplog.text
    assert run_of(tracker).info.status == "RUNNING"


def test_no_thread_is_left_behind():
    before = set(threading.enumerate())
    opened(system_metrics=True).close("FINISHED")
    assert {thread for thread in threading.enumerate() if thread.name.startswith("runner-")} <= before


def runs():
    client = Store(Workspace()).client
    return client.search_runs([client.get_experiment_by_name("tests").experiment_id])


def test_a_run_folder_that_cannot_be_made_is_a_storage_error_and_no_run():
    Workspace().runs.touch()
    with pytest.raises(StorageError, match="RUNNER_WORKSPACE"):
        opened()
    assert runs() == []


@pytest.mark.parametrize(
    ("point", "statuses"), [("start.folder", []), ("start.tracked", ["FAILED"]), ("start.named", ["FAILED"])]
)
def test_a_run_that_cannot_begin_leaves_nothing_but_its_status(point, statuses, monkeypatch):
    monkeypatch.setattr(faults, "_armed", faults.parse(f"{point}=enospc"))
    with pytest.raises(StorageError, match="No space left on device; name another disk in RUNNER_WORKSPACE"):
        opened()
    assert [run.info.status for run in runs()] == statuses
    assert list(Workspace().runs.iterdir()) == []


def test_a_store_that_hangs_is_not_waited_for_at_the_end(monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(Store, "send", lambda *_: released.wait(60))
    tracker = opened()
    assert not tracker.close("FINISHED", patience=0.1)
    assert not released.is_set()
    assert f"runner sync {tracker.run_name}" in caplog.text
    released.set()


def test_a_second_copy_that_hangs_is_not_waited_for_at_the_end(monkeypatch, caplog):
    """The update that hangs is that of the thread, before the end."""
    begun = threading.Event()
    released = threading.Event()

    def hang(*_):
        begun.set()
        released.wait(60)

    monkeypatch.setattr(RunCopy, "update", hang)
    copied = recipe()
    copied.tracking.second_copy = "memory://copies"
    tracker = Tracker.open(Workspace(), copied, {"device": "cpu"})
    assert begun.wait(60)
    tracker.close("FINISHED", patience=0.1)
    assert not released.is_set()
    assert f"the second copy of {tracker.run_name} is incomplete: no answer for 0.1 s" in caplog.text
    released.set()


def test_mlflow_learns_the_status_that_the_disk_refuses(monkeypatch, caplog):
    tracker = opened()
    monkeypatch.setattr(faults, "_armed", faults.parse("spool.append=enospc@1+"))
    assert not tracker.close("FAILED", "the disk is full")
    assert records(tracker.run_dir)[-1].get("status") is None
    assert run_of(tracker).info.status == "FAILED"
    assert "1 lines could not be written" in caplog.text


def test_what_its_user_says_of_a_run_is_in_mlflow_and_in_its_record_also_when_it_goes_on(monkeypatch):
    monkeypatch.setattr(secrets, "_known", frozenset())
    monkeypatch.setattr(secrets, "_pattern", None)
    secrets.register("hush-hush")
    tracker = Tracker.open(Workspace(), recipe(), {"device": "cpu"}, {"who": "me", "key": "hush-hush"}, "for the talk")
    tracker.close("STOPPED")
    folder = RunFolder(tracker.run_dir)
    folder.claim()
    again = Tracker.reopen(Workspace(), folder, recipe(), {}, 0, 0)
    again.close("FINISHED")
    tags = run_of(again).data.tags
    assert (tags["who"], tags["key"], tracker.note) == ("me", MASK, "for the talk")
    record = folder.record()
    assert (record.tags, record.note, record.status) == ({"who": "me", "key": MASK}, "for the talk", "FINISHED")


def test_the_newest_metrics_and_the_time_are_in_the_record_and_time_adds_up():
    tracker = opened()
    tracker.log({"eval/return": 1.0, "train/loss": math.inf}, 1)
    tracker.log({"eval/return": 2.0}, 2)
    tracker.close("STOPPED")
    folder = RunFolder(tracker.run_dir)
    first = folder.record()
    assert first.metrics == {"eval/return": 2.0, "train/loss": math.inf}
    assert first.seconds > 0
    folder.claim()
    again = Tracker.reopen(Workspace(), folder, recipe(), {}, 0, 2)
    again.close("FINISHED")
    assert folder.record().metrics == first.metrics
    assert folder.record().seconds > first.seconds
