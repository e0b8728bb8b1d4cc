import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model
from run_folders import run_folder

from runner.plugin.configs import ServedRequest
from runner.system import faults
from runner.system.manifest import Manifest
from runner.system.workspace_paths import LOCK_NAME
from runner.training.checkpoint import Writer, checkpoints, load
from runner.training.model import REQUEST_SCHEMA, request_fields, write_model


def ended(*scores):
    """A run that has ended, with checkpoints of these scores."""
    folder = run_folder()
    (folder.path / LOCK_NAME).write_text("lock: 1\n")
    writer = Writer(folder.checkpoints)
    for step, score in enumerate(scores, start=1):
        learner = {"modules": {"step": step}, "optimizers": {"momentum": [0.5]}}
        pipeline = {"learner": learner, "source": {}, "stages": {"amp": {}}, "batch_size": 8, "prepared": {}}
        pipeline["progress"] = {"updates": step}
        state = {"pipeline": pipeline, "step": 10 * step, "cursor": 0, "metrics": {}, "complete": False}
        writer.save(10 * step, state, score)
    writer.wait()
    return folder.path


def test_the_model_is_the_best_checkpoint_without_optimizers_and_data(isolated_workspace):
    run_dir = ended(1.0, 3.0, 2.0)
    folder, step = write_model(run_dir)
    assert step == 20
    (kept,) = checkpoints(folder / "checkpoints")
    learner = {"modules": {"step": 2}}
    pipeline = {
        "learner": learner,
        "stages": {},
        "prepared": {},
        "batch_size": 8,
        "classes": [],
        "progress": {"updates": 2},
    }
    assert load(kept) == {"pipeline": pipeline}
    assert (folder / LOCK_NAME).read_text() == "lock: 1\n"


TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list[float]: "array", int | None: "integer"}


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(list(TYPES)), min_size=1))
def test_the_fields_of_a_request_are_those_of_its_schema(fields):
    """Whatever a learner asks for: names and types, with those that may be missing."""
    request = create_model("Request", __base__=ServedRequest, **fields)
    with TemporaryDirectory() as folder:
        schema = json.dumps(request.model_json_schema())
        Manifest(Path(folder)).store_text(Path(folder) / REQUEST_SCHEMA, schema)
        found = request_fields(Path(folder))
    assert list(found) == list(fields)
    for name, kind in fields.items():
        assert found[name] == (f"{TYPES[kind]} or null" if kind == int | None else TYPES[kind])


def test_a_model_that_is_written_again_keeps_the_schema_of_its_request(isolated_workspace):
    run_dir = ended(1.0)
    folder, _ = write_model(run_dir)
    assert request_fields(folder) == {}
    request = create_model("Request", __base__=ServedRequest, prompt=(str, ...))
    write_model(run_dir, request)
    assert write_model(run_dir) == (folder, 10)
    assert request_fields(folder) == {"prompt": "string"}


def test_without_an_objective_it_is_the_last_one(isolated_workspace):
    assert write_model(ended(None, None))[1] == 20


def test_a_disk_that_refuses_it_costs_no_training(isolated_workspace, monkeypatch, caplog):
    run_dir = ended(1.0)
    monkeypatch.setattr(faults, "_armed", faults.parse("checkpoint.tensors=enospc,checkpoint.state=enospc"))
    assert write_model(run_dir) is None
    assert "No space left on device" in caplog.text


def test_a_checkpoint_that_is_damaged_is_said(isolated_workspace, caplog):
    run_dir = ended(1.0)
    (checkpoints(run_dir / "checkpoints")[0] / "state.json").write_text("{}")
    assert write_model(run_dir) is None
    assert "the model could not be written" in caplog.text
