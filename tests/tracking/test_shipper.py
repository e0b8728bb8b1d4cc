import errno
import json
import math
import os

import pytest
from mlflow.exceptions import MlflowException

from runner.system import faults
from runner.tracking.spool import Shipper, Spool, offset_file, reached
from runner.tracking.store import Store
from runner.tracking.workspace import Workspace


@pytest.fixture
def store(migrated_workspace):
    return Store(Workspace())


@pytest.fixture
def run_id(store):
    return store.create_run(store.experiment("tests"), "a")


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path / "spool.jsonl")
    yield spool
    spool.close()


def history(store, run_id, key):
    return [(point.step, point.value, point.timestamp) for point in store.client.get_metric_history(run_id, key)]


def test_every_kind_of_record_arrives(store, run_id, spool, tmp_path):
    (tmp_path / "lock.yaml").write_text("seed: 1")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "a.svg").write_text("<svg/>")
    spool.append(t=1, params={"seed": "1"})
    spool.append(t=1, tags={"stages": "amp"})
    spool.append(t=2, step=10, metrics={"loss": 0.5})
    spool.append(t=3, artifact="lock.yaml")
    spool.append(t=3, artifact=str(tmp_path / "plots"))
    spool.append(t=1_800_000_000_000, status="KILLED")
    shipper = Shipper(store, run_id, spool.path)
    shipper.ship()

    run = store.client.get_run(run_id)
    assert run.data.params == {"seed": "1"}
    assert run.data.tags["stages"] == "amp"
    assert history(store, run_id, "loss") == [(10, 0.5, 2)]
    assert (run.info.status, run.info.end_time) == ("KILLED", 1_800_000_000_000)
    assert {"lock.yaml", "a.svg"} <= {file.path for file in store.client.list_artifacts(run_id)}
    assert shipper.pending == 0


def test_data_and_model_of_a_run_are_logged_once_however_often_they_are_sent(store, run_id, spool, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1 2 3")
    spool.append(t=1, dataset={"name": "digits", "digest": "3f2a91c0", "profile": '{"held_out": 360}'})
    spool.append(t=1, step=6, metrics={"eval/loss": 0.5})
    spool.append(t=2, step=7, metrics={"eval/loss": 0.2, "train/loss": 0.1}, params={"seed": "3"})
    spool.append(t=3, step=8, metrics={"eval/loss": 0.4})
    spool.append(t=4, step=7, model="model")
    for _ in range(2):
        offset_file(spool.path).unlink(missing_ok=True)
        Shipper(store, run_id, spool.path).ship()
    run = store.client.get_run(run_id)
    (given,) = run.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("digits", "3f2a91c0")
    assert json.loads(given.dataset.profile) == {"held_out": 360}
    (model,) = run.outputs.model_outputs
    assert model.step == 7
    (logged,) = store.client.search_logged_models([run.info.experiment_id])
    assert (logged.model_id, logged.status, logged.source_run_id) == (model.model_id, "READY", run_id)
    assert logged.params == {"seed": "3"}
    assert [(each.key, each.value, each.step) for each in logged.metrics] == [("eval/loss", 0.2, 7)]
    assert f'runner.load_model("{logged.model_uri}")' in logged.tags["mlflow.note.content"]
    assert history(store, run_id, "eval/loss") == [(6, 0.5, 1), (7, 0.2, 2), (8, 0.4, 3)]
    assert (store.model(logged.model_uri) / "weights").read_text() == "1 2 3"


def test_a_model_that_was_begun_by_a_process_that_died_is_finished(store, run_id, spool, tmp_path):
    (tmp_path / "model").mkdir()
    begun = store.client.create_logged_model(store.experiment("tests"), "a", run_id)
    spool.append(t=1, model="model")
    Shipper(store, run_id, spool.path).ship()
    (model,) = store.client.get_run(run_id).outputs.model_outputs
    assert model.model_id == begun.model_id


def test_another_process_continues_where_the_first_stopped(store, run_id, spool):
    spool.append(t=1, step=1, metrics={"loss": 1.0})
    Shipper(store, run_id, spool.path).ship()
    spool.append(t=2, step=2, metrics={"loss": 0.5})
    again = Shipper(store, run_id, spool.path)
    assert again.pending == len(json.dumps({"t": 2, "step": 2, "metrics": {"loss": 0.5}}, separators=(",", ":"))) + 1
    again.ship()
    assert history(store, run_id, "loss") == [(1, 1.0, 1), (2, 0.5, 2)]


def test_a_spool_sent_twice_changes_nothing(store, run_id, spool):
    for step in range(1200):  # several batches
        spool.append(t=step, step=step, metrics={"loss": float(step)})
    Shipper(store, run_id, spool.path).ship()
    first = history(store, run_id, "loss")
    spool.path.with_suffix(".offset").unlink()
    Shipper(store, run_id, spool.path).ship()
    assert history(store, run_id, "loss") == first
    assert len(first) == 1200


def test_a_store_that_is_away_is_reported_once_and_everything_arrives_later(store, run_id, spool, monkeypatch, caplog):
    shipper = Shipper(store, run_id, spool.path)
    with monkeypatch.context() as outage:

        def refuse(*_, **__):
            raise MlflowException("API request failed: connection refused")

        outage.setattr(store.client, "log_batch", refuse)
        for step in range(3):
            spool.append(t=step, step=step, metrics={"loss": 1.0})
            assert not shipper.try_to_ship()
        assert [entry.getMessage().count("connection refused") for entry in caplog.records] == [1]
    assert shipper.try_to_ship()
    assert len(history(store, run_id, "loss")) == 3
    assert "nothing was lost" in caplog.text


def test_infinities_leave_a_gap_in_the_curve(store, run_id, spool):
    spool.append(t=1, step=1, metrics={"a": "nan", "b": "inf", "c": "-inf"})
    Shipper(store, run_id, spool.path).ship()
    assert all(math.isnan(value) for value in store.client.get_run(run_id).data.metrics.values())


def test_an_artifact_that_is_gone_does_not_hold_up_the_rest(store, run_id, spool, caplog):
    spool.append(t=1, artifact="gone.yaml")
    spool.append(t=1, step=1, metrics={"loss": 1.0})
    Shipper(store, run_id, spool.path).ship()
    assert history(store, run_id, "loss") == [(1, 1.0, 1)]
    assert "gone.yaml no longer exists" in caplog.text


DAMAGED = [
    '{"t":1,"step":2}',
    '{"step":2,"metrics":{"loss":1.0}}',
    '{"t":1,"step":"x","metrics":{"loss":1.0}}',
    '{"t":1,"step":99999999999999999999,"metrics":{"loss":1.0}}',
    '{"t":1,"step":2,"metrics":{"loss":"much"}}',
    '{"t":1,"step":2,"metrics":[1]}',
    '{"t":1,"status":"DONE"}',
    '{"t":1,"artifact":7}',
    '{"t":1,"artifact":"\\u0000","folder":""}',
    "3",
    "\0",
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_does_not_hold_up_the_rest(line, store, run_id, spool):
    spool.path.write_text(line + "\n")
    spool.append(t=1, step=1, metrics={"loss": 1.0})
    spool.path.write_bytes(spool.path.read_bytes() + line.encode() + b"\n")
    shipper = Shipper(store, run_id, spool.path)
    shipper.ship()
    assert history(store, run_id, "loss") == [(1, 1.0, 1)]
    assert shipper.pending == 0
    assert store.client.get_run(run_id).info.status == "RUNNING"


def test_artifacts_that_cannot_be_kept_hold_up_nothing_but_themselves(store, run_id, spool, tmp_path, monkeypatch):
    (tmp_path / "lock.yaml").write_text("seed: 1")
    spool.append(t=1, artifact="lock.yaml")
    spool.append(t=1, step=1, metrics={"loss": 1.0})
    spool.append(t=5, status="FINISHED")
    shipper = Shipper(store, run_id, spool.path)
    with monkeypatch.context() as full:

        def refuse(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(store.client, "log_artifact", refuse)
        assert not shipper.try_to_ship()
    assert history(store, run_id, "loss") == [(1, 1.0, 1)]
    assert store.client.get_run(run_id).info.status == "FINISHED"
    assert shipper.try_to_ship()
    assert [file.path for file in store.client.list_artifacts(run_id)] == ["lock.yaml"]


def test_a_place_that_cannot_be_written_does_not_stop_the_shipping(store, run_id, spool, monkeypatch):
    monkeypatch.setattr(faults, "_armed", faults.parse("ship.sent=enospc@1+"))
    shipper = Shipper(store, run_id, spool.path)
    for step in range(2):
        spool.append(t=step, step=step, metrics={"loss": 1.0})
        assert shipper.try_to_ship()
    assert shipper.pending == 0
    assert len(history(store, run_id, "loss")) == 2
    assert reached(spool.path) == 0


def test_what_was_abandoned_is_not_said_to_be_sent(store, run_id, spool, caplog, monkeypatch):
    shipper = Shipper(store, run_id, spool.path)
    spool.append(t=1, step=1, metrics={"loss": 0.5})
    with monkeypatch.context() as context:
        context.setattr(store, "send", lambda *_: 1 / 0)
        assert not shipper.try_to_ship()
    shipper.abandoned.set()
    assert not shipper.try_to_ship()
    assert "nothing was lost" not in caplog.text
    shipper.abandoned.clear()
    assert shipper.try_to_ship()
    assert "nothing was lost" in caplog.text
