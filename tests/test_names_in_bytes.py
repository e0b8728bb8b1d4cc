"""Names of files are bytes. What is recorded of a run is complete whatever the bytes."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from run_folders import run_folder
from toy_runs import RECIPE, TOYS

import runner
from runner.recipe.lock import changed_sources, plugins_again, read_lock
from runner.system.escapes import escape_undecodable, restore_undecodable
from runner.system.secrets import redact_values
from runner.tracking import Workspace
from runner.tracking.spool import Spool, lines
from runner.tracking.store import Store, params_of

NAMES = {
    "latin1": b"caf\xe9",
    "byte_order_mark": b"\xff\xfe",
    "continuation": b"\x80",
    "encoded_surrogate": b"a\xed\xa0\x80b",
    "cut_character": b"\xc3(",
    "shift_jis": b"\x93\xfa\x96\x7b",
}
file_names = st.binary(min_size=1, max_size=12).map(os.fsdecode)
per_example = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def plain_tags(tmp_path, migrated_workspace):
    """Names of the tags of a run whose files have plain names."""
    return set(tags_of(trained(tmp_path, "plain")))


def trained(folder, name):
    """Trains a recipe with a plugin, both of which have this name."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE)
    plugin = folder / f"{name}.py"
    plugin.write_bytes(TOYS.read_bytes())
    return runner.train(recipe, {"train.updates": 2}, plugins=[plugin], tags={"origin": name}, note=name)


def tags_of(result):
    return Store(Workspace()).client.get_run(result.run_id).data.tags


def test_a_run_has_all_its_tags_and_finds_its_plugin(tmp_path, plain_tags, caplog):
    for key, raw in NAMES.items():
        folder = tmp_path / key
        folder.mkdir()
        name = os.fsdecode(raw)
        result = trained(folder, name)
        tags = tags_of(result)
        assert set(tags) == plain_tags
        assert tags["mlflow.source.name"] == escape_undecodable(str(folder / f"{name}.yaml"))
        assert tags["origin"] == escape_undecodable(name)
        locked = read_lock(Path(result.lock))
        assert plugins_again(locked, []) == [folder / f"{name}.py"]
        assert changed_sources(locked, plugins_again(locked, [])) == {}
    assert "damaged" not in caplog.text


@per_example
@given(st.dictionaries(file_names, file_names, max_size=3))
@example({os.fsdecode(raw): os.fsdecode(raw) for raw in NAMES.values()})
def test_what_a_spool_is_given_is_read_back(tmp_path_factory, tags):
    spool = Spool(tmp_path_factory.mktemp("spool") / "spool.jsonl")
    spool.append(t=1, tags=tags, params=tags, status="FAILED")
    spool.close()
    ((line, _),) = lines(spool.path)
    assert line.status == "FAILED"
    assert {restore_undecodable(key): restore_undecodable(value) for key, value in line.tags.items()} == tags


@per_example
@given(file_names)
@example(os.fsdecode(NAMES["latin1"]))
def test_a_record_takes_any_name(name):
    folder = run_folder(note=name, reason=name, overrides={"data.file": name}, tags={name: name})
    record = folder.record()
    assert record is not None, folder.record_problem()
    assert record.note == record.reason == record.overrides["data.file"] == escape_undecodable(name)


@per_example
@given(st.dictionaries(file_names, st.lists(file_names, max_size=2), max_size=2))
def test_stored_values_and_params_are_strict_json(values):
    stored = redact_values(values)
    assert from_json(json.dumps(stored)) == stored
    assert len(stored) == len(values)
    params = params_of(values)
    assert from_json(json.dumps(params)) == params


@per_example
@given(st.text(st.characters(exclude_characters="\\"), max_size=20))
def test_an_escaped_name_is_restored(name):
    escaped = escape_undecodable(name)
    assert escaped.encode().decode() == escaped
    assert restore_undecodable(escaped) == name
