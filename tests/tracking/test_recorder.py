import errno
import math

import pytest
from outages import records

from runner.tracking.keys import mlflow_key
from runner.tracking.recorder import Recorder


def test_a_metric_is_written_with_its_step_under_its_whole_name(tmp_path):
    recorder = Recorder(tmp_path / "spool.jsonl", prefix="seed_1/")
    recorder.log({"eval/<return>": 2.0}, 5)
    (record,) = records(tmp_path)
    assert (record["step"], record["metrics"]) == (5, {mlflow_key("seed_1/eval/<return>"): 2.0})
    assert recorder.step == 5


def test_the_first_number_that_is_not_finite_is_named_once(tmp_path):
    recorder = Recorder(tmp_path / "spool.jsonl", prefix="seed_1/")
    for step in (1, 2):
        recorder.log({"loss": math.nan}, step)
    tag, *metrics = records(tmp_path)
    assert tag["tags"] == {"not_finite.seed_1/loss": "nan at step 1"}
    assert [record["metrics"] for record in metrics] == [{"seed_1/loss": "nan"}] * 2


def test_what_a_dead_process_logged_is_not_logged_again(tmp_path):
    path = tmp_path / "spool.jsonl"
    dead = Recorder(path)
    dead.log({"loss": 1.0}, 10)
    place = dead.mark()
    dead.log({"loss": 0.5}, 20)
    dead.spool.close()

    resumed = Recorder(path, place, 10)
    assert resumed.mark() == place  # what is still to come again would be missed from later on
    resumed.log({"loss": 0.5}, 20)
    resumed.log({"loss": 0.25}, 30)
    assert [(record["step"], record["metrics"]["loss"]) for record in records(tmp_path)] == [
        (10, 1.0),
        (20, 0.5),
        (30, 0.25),
    ]
    assert resumed.mark() == path.stat().st_size


def test_a_disk_that_refuses_stops_a_checkpoint(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "spool.jsonl")
    monkeypatch.setattr(recorder.spool, "sync", lambda: False)
    with pytest.raises(OSError, match="refuses the run's metrics") as raised:
        recorder.sync()
    assert raised.value.errno == errno.ENOSPC
