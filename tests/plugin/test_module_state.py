"""Buffers of any kind are saved and restored, in place or replaced."""

import pytest
import torch
from torch import nn

from runner.plugin.module_state import BufferSnapshot, load_module

INITIAL = {
    "float": lambda: torch.arange(3.0),
    "integer": lambda: torch.arange(3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "none": lambda: None,
}


def replace_it(module):
    buffer = module.buffer
    module.buffer = torch.ones(1) if buffer is None else buffer * 2.5


def replace_type(module):
    module.buffer = torch.full((3,), 0.5, dtype=torch.float64)


def grow(module):
    module.buffer = torch.zeros(7, 3)


def write(module):
    if module.buffer is None or 0 in module.buffer.stride():
        return
    module.buffer.mul_(2)


def resize(module):
    if module.buffer is not None and module.buffer.layout is torch.strided and 0 not in module.buffer.stride():
        module.buffer.resize_(2)


def write_data(module):
    if module.buffer is not None and module.buffer.layout is torch.strided:
        module.buffer.data = torch.full((3,), 0.25)


def write_and_replace(module):
    write(module)
    replace_it(module)


def empty(module):
    module.buffer = None


def remove(module):
    del module.buffer


def register(module):
    module.register_buffer("another", torch.ones(2), persistent=False)


CHANGES = (replace_it, replace_type, grow, write, resize, write_data, write_and_replace, empty, remove, register)


def module_with(kind):
    root = nn.Module()
    root.child = nn.Module()
    root.child.register_buffer("buffer", INITIAL[kind]())
    root.child.register_buffer("unsaved", torch.zeros(1), persistent=False)
    # Both names are those of one tensor.
    root.register_buffer("buffer", root.child.buffer)
    return root


def dense(tensor):
    return tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor


@pytest.mark.parametrize("kind", INITIAL)
@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_restores_buffers_whatever_has_changed_them(change, kind):
    root = module_with(kind)
    buffer = root.buffer
    expected = INITIAL[kind]()
    snapshot = BufferSnapshot([root, nn.Linear(2, 2)])
    change(root.child)
    root.child.unsaved = root.child.unsaved + 1
    snapshot.restore()
    assert root.buffer is root.child.buffer
    assert list(root.child._buffers) == ["buffer", "unsaved"]
    assert root.child._non_persistent_buffers_set == {"unsaved"}
    assert root.child.unsaved.item() == 0
    if expected is None:
        assert root.buffer is None
        return
    assert (root.buffer.dtype, root.buffer.layout) == (expected.dtype, expected.layout)
    assert torch.equal(dense(root.buffer), dense(expected))
    # Memory that was not resized stays, because a stage may read it.
    if kind in ("float", "integer") and change not in (resize, write_data):
        assert root.buffer is buffer


def net(dtype, buffer):
    module = nn.Linear(2, 1, dtype=dtype)
    module.register_buffer("buffer", buffer)
    return module


TYPES = (torch.int64, torch.bool, torch.float16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("initial", TYPES)
@pytest.mark.parametrize("later", TYPES)
def test_a_buffer_that_has_changed_its_type_is_loaded_as_it_was(initial, later):
    trained = net(torch.float32, torch.tensor([0.1, 3.7]).to(later))
    fresh = net(torch.float32, torch.zeros(2, dtype=initial))
    before = fresh.buffer
    load_module(fresh, trained.state_dict())
    assert fresh.buffer.dtype == later
    assert torch.equal(fresh.buffer, trained.buffer)
    assert fresh.buffer is not trained.buffer
    # Captured addresses stay where the type does.
    assert (fresh.buffer is before) == (initial == later)


@pytest.mark.parametrize("saved", [torch.float32, torch.float64])
def test_a_module_of_another_precision_has_buffers_of_this_precision(saved):
    present = torch.float64 if saved == torch.float32 else torch.float32
    trained = net(saved, torch.tensor([0.5, 3.75], dtype=saved))
    trained.register_buffer("fraction", torch.tensor(0.5, dtype=saved))
    fresh = net(present, torch.zeros(2, dtype=present))
    fresh.register_buffer("fraction", torch.tensor(1))
    load_module(fresh, trained.state_dict())
    assert fresh.buffer.dtype == present
    assert fresh.buffer.tolist() == [0.5, 3.75]
    assert fresh.fraction.item() == 0.5


def test_names_that_are_missing_are_refused_unless_allowed():
    fresh = net(torch.float32, torch.zeros(2))
    state = {"buffer": torch.ones(2)}
    with pytest.raises(RuntimeError, match="weight"):
        load_module(fresh, state)
    load_module(fresh, state, strict=False)
    assert fresh.buffer.tolist() == [1, 1]
