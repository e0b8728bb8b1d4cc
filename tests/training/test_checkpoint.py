import hashlib
import json
import os
import shutil

import pytest
import torch
from builders import build_masac, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.plugin.ring import Ring
from runner.system.errors import CheckpointError
from runner.training import checkpoint
from runner.training.checkpoint import Writer

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text()
    | st.builds(
        lambda n, seed: torch.rand(n, generator=torch.Generator().manual_seed(seed)),
        st.integers(0, 5),
        st.integers(0, 99),
    )
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=12,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def save(folder, step, state, score=None):
    writer = Writer(folder)
    writer.save(step, state, score)
    writer.wait()
    assert writer.failure is None
    return writer.newest()


def names(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoint.checkpoints(folder)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), trees, max_size=4))
def test_any_state_comes_back_as_it_was(tmp_path, state):
    shutil.rmtree(tmp_path)
    assert same(state, checkpoint.load(save(tmp_path, 1, state)))


def test_a_learner_continues_bit_for_bit(tmp_path):
    first, second = build_masac(), build_masac(seed=9)
    train(first, 3)
    second.load_state_dict(checkpoint.load(save(tmp_path, 3, first.state_dict())))
    expected, found = train(first, 2, seed=50), train(second, 2, seed=50)
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 5, 4, 2).to(memory_format=torch.channels_last),
        torch.rand(4, 6).t(),
        torch.rand(3, 1).expand(3, 4),
        torch.rand(6, 6)[:, ::2],
    ],
    ids=["channels_last", "transposed", "expanded", "sliced"],
)
def test_a_tensor_comes_back_where_torch_would_have_put_it(tmp_path, tensor):
    state = {"odd": torch.ones(3, dtype=torch.uint8), "tensor": tensor}
    loaded = checkpoint.load(save(tmp_path, 1, state))["tensor"]
    assert torch.equal(loaded, tensor)
    assert loaded.stride() == tensor.clone().stride()  # which keeps a dense layout, and packs any other
    assert loaded.data_ptr() % 64 == 0, "matrix products depend on it to the last bit"


FILES = [
    "tensors-0.safetensors",
    "rows-0-000000000000-000000000003.safetensors",
    checkpoint.STATE_FILE,
    checkpoint.MANIFEST,
]


def with_ring(number=1):
    rows = torch.arange(6.0).view(3, 2)
    return {"a": torch.ones(3), "b": number, "ring": Ring(5, 3, lambda first, last: rows[first:last])}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def link(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


DAMAGES = pytest.mark.parametrize("damage", [flip, cut, link, os.unlink], ids=lambda each: each.__name__)


@DAMAGES
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(tmp_path, name, damage, caplog):
    _, newer = save(tmp_path, 1, with_ring()), save(tmp_path, 2, with_ring(2))
    assert {path.name for path in newer.iterdir()} == set(FILES)
    damage(newer / name)
    assert checkpoint.load_newest(tmp_path)["b"] == 1
    assert name in caplog.text
    assert save(tmp_path, 2, with_ring(2)) == newer  # the training comes past it again
    assert checkpoint.load_newest(tmp_path)["b"] == 2
    assert names(tmp_path) == [1, 2]


@DAMAGES
def test_when_all_are_damaged_there_is_none_to_use(tmp_path, damage):
    for step in (1, 2):
        damage(save(tmp_path, step, with_ring()) / checkpoint.STATE_FILE)
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        checkpoint.load_newest(tmp_path)


def test_no_checkpoint_at_all_is_no_damage(tmp_path):
    assert checkpoint.load_newest(tmp_path) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_is_noticed(tmp_path, data):
    shutil.rmtree(tmp_path)
    path = save(tmp_path, 1, with_ring())
    file = path / data.draw(st.sampled_from(FILES))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a\0b", "step-1/x", ".", "other.safetensors"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path, name):
    path = save(tmp_path, 1, with_ring())
    files = {name: hashlib.sha256(b"").hexdigest()}
    checkpoint.write_manifest(path, {"format": 1, "step": 1, "done": 1, "score": None, "sha256": files})
    with pytest.raises(checkpoint.DamagedError, match="names a file that no checkpoint has"):
        checkpoint.load(path)


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path):
    save(tmp_path, 1, {})
    path = save(tmp_path, 2, {})
    text = json.dumps({"format": 99, "something": "else"})
    (path / checkpoint.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match="format 99 is newer than 2"):
        checkpoint.load_newest(tmp_path)


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a/b"):
        save(tmp_path, 1, {"a": {"b": object()}})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 16))
def test_a_ring_comes_back_with_its_newest_rows(tmp_path, capacity, additions, rows_per_file):
    shutil.rmtree(tmp_path)
    memory, written = torch.full((capacity, 2), -1.0), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runner.training.checkpoint.SEGMENT_BYTES", 8 * rows_per_file)
        patch.setattr("runner.training.checkpoint.sync", lambda path: None)  # a disk's time is not what is tested
        for step, count in enumerate(additions):
            for number in range(written, written + count):
                memory[number % capacity] = torch.tensor([number, -number])
            written += count
            ring = Ring(capacity, written, lambda first, last: memory[torch.arange(first, last) % capacity])
            loaded = checkpoint.load(save(tmp_path, step, {"ring": ring}))["ring"]
            assert (loaded.capacity, loaded.written) == (capacity, written)
            found = [row for _, rows in loaded.pieces() for row in rows.tolist()]
            assert found == [[float(n), float(-n)] for n in range(max(0, written - capacity), written)]
