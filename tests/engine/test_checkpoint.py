import json
import shutil

import pytest
import torch
from builders import build_masac, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.engine import checkpoint
from runner.errors import CheckpointError

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), trees, max_size=4))
def test_any_state_comes_back_as_it_was(tmp_path, state):
    shutil.rmtree(tmp_path)
    assert same(state, checkpoint.load(checkpoint.save(tmp_path, 1, state)))


def test_a_learner_continues_bit_for_bit(tmp_path):
    first, second = build_masac(), build_masac(seed=9)
    train(first, 3)
    second.load_state_dict(checkpoint.load(checkpoint.save(tmp_path, 3, first.state_dict())))
    expected, found = train(first, 2, seed=50), train(second, 2, seed=50)
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


def test_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 200):
        checkpoint.save(tmp_path, step, {"step": step})
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-000000000010", "step-000000000200"]
    assert checkpoint.load(checkpoint.checkpoints(tmp_path)[-1]) == {"step": 200}


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.REST, checkpoint.MANIFEST])
def test_a_flipped_byte_or_missing_file_is_noticed(tmp_path, name):
    path = checkpoint.save(tmp_path, 1, {"a": torch.ones(3), "b": 1})
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.load(path)


def test_a_newer_format_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, {})
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="newer"):
        checkpoint.load(path)


def test_what_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a/b"):
        checkpoint.save(tmp_path, 1, {"a": {"b": object()}})
