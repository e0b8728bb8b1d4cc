"""Checkpoints whose manifests fit, and whose contents come from someone else."""

import copy
import io
import json
import os
import pickle
import shutil
import struct
import sys
import time
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inference_stages.learnt import learnt
from safetensors.torch import save

from runner.plugin.ring import Ring
from runner.system.errors import CheckpointError, DamagedError
from runner.system.files import sha256
from runner.training import checkpoint
from runner.training.checkpoint import Writer
from runner.training.checkpoint_files import MANIFEST, STATE_FILE, write_manifest
from runner.training.state_schema import check_state

LONGEST_SECONDS = 5.0
"""Of this process's processor time, which does not depend on what else the machine does."""
ROWS = torch.arange(6.0).view(3, 2)
STATE = {
    "module": {"weight": torch.rand(3, 2, 2, 2).to(memory_format=torch.channels_last), "bias": torch.rand(2)},
    "half": torch.rand(3).to(torch.float8_e5m2),
    "sparse": torch.eye(3).to_sparse(),
    "numbers": [1, 2.5, None, True, "text", 10**40, 1j, b"x", range(3), torch.float32, torch.device("cpu"), (1,), {2}],
    "array": torch.rand(2, 3).numpy(),
    "ring": Ring(5, 3, lambda first, last: ROWS[first:last]),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    writer = Writer(tmp_path_factory.mktemp("stored"))
    writer.save(1, STATE)
    writer.wait()
    return writer.newest()


@pytest.fixture
def stored(original, tmp_path):
    return shutil.copytree(original, tmp_path / original.name)


def reseal(path):
    """Writes the manifest that fits the files."""
    manifest = json.loads((path / MANIFEST).read_text().partition("\n")[0])
    names = [file.name for file in path.iterdir() if file.name != MANIFEST]
    manifest["sha256"] = {name: sha256(path / name) for name in names}
    manifest["bytes"] = {name: (path / name).stat().st_size for name in names}
    write_manifest(path, manifest)


def fault_of(call):
    """What is said of a damaged file; nothing if there is none."""
    try:
        call()
    except DamagedError as error:
        return str(error)
    return ""


def places(node, path=()):
    """The paths of all values in JSON."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def replaced(node, path, value):
    if not path:
        return value
    node = copy.copy(node)
    node[path[0]] = replaced(node[path[0]], path[1:], value)
    return node


def deep(levels):
    return json.loads('{"list": [' * levels + '{"value": 1}' + "]}" * levels)


HOSTILE = st.sampled_from(
    [
        -1, 2**31, 2**63, 2**64, -(2**70), 0, 1.5, float("inf"), float("nan"), None, True, "", "x" * 10_000, [],
        {}, [[]], [1, -1], [0], [2**40, 2**40], [2**62, 2], "../../x", "load", "__class__", "float32", "O",
        "V99999999999", "cuda:99",
        {"value": []}, {"list": 5}, {"tensor": "0", "stride": None}, {"ring": {}}, {"path": 3}, {"dtype": "load"},
        {"sparse": "sparse_csr", "size": [9], "parts": {}}, {"range": [0, 1, 0]}, {"int": "zz"}, deep(99), deep(150),
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_of_a_state_may_be_another_one(original, tmp_path, data):
    shutil.rmtree(tmp_path)
    path = shutil.copytree(original, tmp_path / original.name)
    state = json.loads((path / STATE_FILE).read_text())
    place = data.draw(st.sampled_from(list(places(state))))
    (path / STATE_FILE).write_text(json.dumps(replaced(state, place, data.draw(HOSTILE))))
    reseal(path)
    started = time.process_time()
    fault = fault_of(lambda: checkpoint.load(path))
    assert not fault or (str(path) in fault and "\n" not in fault)
    assert time.process_time() - started < LONGEST_SECONDS


def header(length, text="{}"):
    return struct.pack("<Q", length) + text.encode()


def many_names():
    names = ",".join(f'"{number}":{{"dtype":"F32","shape":[],"data_offsets":[0,4]}}' for number in range(700_000))
    return header(len(names) + 2, f"{{{names}}}") + b"\0" * 4


FILES = {
    "a header of 700,000 names": many_names,
    "a header of 2^63 bytes": lambda: header(2**63),
    "a header that is a list": lambda: header(2, "[]"),
    "a header that is no JSON": lambda: header(2, "{a"),
    "a header nested deeply": lambda: header(200_000, "[" * 200_000),
    "an empty file": lambda: b"",
    "text": lambda: b"hello",
    "another type of numbers": lambda: tensors({"0/x": torch.zeros(2).to(torch.float8_e5m2)}),
    "a name that is none": lambda: tensors({"x": torch.zeros(2)}),
    "one more tensor": lambda: tensors({"999": torch.zeros(2)}),
    "10,000 more tensors": lambda: tensors({str(number): torch.zeros(1) for number in range(10_000)}),
    "no tensor": lambda: tensors({}),
}


def tensors(named):
    return save(named)


@pytest.mark.parametrize("file", ["tensors-0.safetensors", "rows-0-000000000000-000000000003.safetensors", STATE_FILE])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_is_refused_quickly(name, file, stored):
    (stored / file).write_bytes(FILES[name]())
    reseal(stored)
    started = time.process_time()
    with pytest.raises(DamagedError, match=str(stored)):
        checkpoint.load(stored)
    assert time.process_time() - started < LONGEST_SECONDS


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "missing", "socket to nowhere"])
@pytest.mark.parametrize(
    "file", ["tensors-0.safetensors", "rows-0-000000000000-000000000003.safetensors", STATE_FILE, MANIFEST]
)
def test_what_is_no_regular_file_is_refused_at_once(kind, file, stored):
    path = stored / file
    path.rename(stored.parent / "elsewhere")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(stored.parent / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket to nowhere":
        path.symlink_to("/proc/self/fd/0")
    started = time.process_time()
    with pytest.raises(DamagedError, match=file):
        checkpoint.load(stored)
    assert time.process_time() - started < LONGEST_SECONDS


MANIFESTS = [
    {"format": "2"}, {"format": -1}, {"format": None}, {"format": []}, {"format": True}, {"step": -1}, {"step": "1"},
    {"step": 1.5}, {"step": 2**64}, {"done": "all"}, {"done": None}, {"done": float("nan")}, {"done": []},
    {"score": "best"},
    {"score": float("nan")}, {"score": float("inf")}, {"score": []}, {"score": True}, {"sha256": []}, {"sha256": None},
    {"sha256": {}}, {"sha256": {"state.json": 5}}, {"sha256": {"state.json": "0"}}, {"sha256": {"../x": "0" * 64}},
    {"sha256": {"tensors-0.safetensors": "0" * 64}}, {"bytes": []}, {"bytes": {"state.json": -1}},
    {"bytes": {"state.json": 5}}, {"bytes": {"state.json": "5"}},
]  # fmt: skip


@pytest.mark.parametrize("change", MANIFESTS, ids=str)
def test_a_manifest_of_another_form_is_refused(change, stored):
    manifest = json.loads((stored / MANIFEST).read_text().partition("\n")[0])
    write_manifest(stored, manifest | change)
    with pytest.raises(DamagedError, match=str(stored)):
        checkpoint.load(stored)
    assert checkpoint.best([stored]) in (None, stored)


@pytest.mark.parametrize("key", ["format", "step", "done", "score", "sha256"])
def test_a_manifest_without_an_entry_is_refused(key, stored):
    manifest = json.loads((stored / MANIFEST).read_text().partition("\n")[0])
    del manifest[key]
    write_manifest(stored, manifest)
    with pytest.raises(DamagedError, match=MANIFEST):
        checkpoint.load(stored)


def test_a_linked_checkpoint_is_refused(stored):
    link = stored.with_name("step-000000000002")
    link.symlink_to(stored)
    with pytest.raises(DamagedError, match="is a link"):
        checkpoint.load(link)


@pytest.fixture(scope="module")
def pipeline():
    return learnt("digits_classifier")


NAMES = ("stem.0.weight", "head.weight", "head.bias")
CHANGES = {
    "float64": lambda tensor: tensor.double(),
    "float16": lambda tensor: tensor.half(),
    "bfloat16": lambda tensor: tensor.bfloat16(),
    "complex": lambda tensor: tensor.cfloat(),
    "whole numbers": lambda tensor: tensor.int(),
    "truth values": lambda tensor: tensor.bool(),
    "another shape": lambda tensor: tensor.flatten()[1:],
    "no dimensions": lambda tensor: tensor.sum(),
    "sparse": lambda tensor: tensor.to_sparse(),
    "NaN": lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("nan")),
    "infinite": lambda tensor: tensor.index_fill(0, torch.tensor([1]), float("inf")),
    "minus infinite": lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("-inf")),
    "a text": lambda tensor: "weights",
    "a list": lambda tensor: tensor.tolist(),
    "nothing": lambda tensor: None,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_weights_of_another_form_are_refused(change, name, pipeline):
    state = pipeline.state_dict()
    weights = dict(state["learner"]["modules"]["model"])
    weights[name] = CHANGES[change](weights[name])
    learner = {**state["learner"], "modules": {"model": weights}}
    before = {key: tensor.clone() for key, tensor in pipeline.learner.module.state_dict().items()}
    try:
        with pytest.raises(CheckpointError):
            pipeline.load_learnt({**state, "learner": learner})
    finally:
        pipeline.learner.module.load_state_dict(before)


def test_other_entries_of_a_learner_are_refused(pipeline):
    state = pipeline.state_dict()
    learner = {**state["learner"], "extra": {str(number): torch.zeros(1) for number in range(1000)}}
    with pytest.raises(CheckpointError, match="the learner has no entry 'extra'"):
        pipeline.load_learnt({**state, "learner": learner})


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, {"a": 1}, {1: {}}, 0, 1.5, torch.zeros(1)], ids=repr)
@pytest.mark.parametrize("key", ["learner", "stages", "progress", "batch_size", "prepared", "classes", "device"])
def test_the_state_of_a_pipeline_has_its_form(key, value, pipeline, tmp_path):
    state = {"pipeline": {**pipeline.state_dict(), key: value}}
    fault = fault_of(lambda: check_state(state, tmp_path))
    assert key in fault if fault else isinstance(value, str | dict | list)
    assert not fault or str(tmp_path / STATE_FILE) in fault


class Command:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickles():
    """Files that execute a command if anything unpickles them."""
    saved = io.BytesIO()
    torch.save({"0": Command()}, saved)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Command()))
    plain = {f"protocol {number}": pickle.dumps(Command(), number) for number in range(6)}
    lists = {f"a list, protocol {number}": pickle.dumps([Command()], number) for number in range(6)}
    return {**plain, **lists, "torch.save": saved.getvalue(), "an archive": archive.getvalue()}


UNPICKLED: list = []
sys.addaudithook(lambda event, arguments: UNPICKLED.append(arguments) if event == "pickle.find_class" else None)


@pytest.mark.parametrize(
    "file", ["tensors-0.safetensors", "rows-0-000000000000-000000000003.safetensors", STATE_FILE, MANIFEST]
)
@pytest.mark.parametrize("name", pickles())
def test_no_pickle_is_ever_read(name, file, stored, monkeypatch):
    monkeypatch.chdir(stored.parent)
    (stored / file).write_bytes(pickles()[name])
    if file != MANIFEST:
        reseal(stored)
    UNPICKLED.clear()
    with pytest.raises(DamagedError):
        checkpoint.load(stored)
    assert UNPICKLED == []
    assert not os.path.exists("executed")
