"""Blocks that are computed again start from the state of their first forward."""

import random
import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from runner.api import RunnerError
from runner.plugins.stages.activation_checkpointing import _checkpointed, _explained, _recomputed
from runner.plugins.stages.block_segments import postpone

WIDTH = 4


class Rebound(nn.Module):
    """Assigns another tensor to a buffer that scales its output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        self.scale = 0.9 * self.scale + x.detach().abs().mean(0)
        return x.square() * self.scale


class WrittenPastVersions(Rebound):
    """Writes in a way that torch does not count."""

    def forward(self, x):
        self.scale.data.mul_(0.9).add_(x.detach().abs().mean(0))
        return x.square() * self.scale.clone()


class Late(nn.Module):
    """Registers a buffer in its first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("always", torch.ones(()))

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(WIDTH))
        self.scale = self.scale + x.detach().abs().mean(0)
        return x.square() * self.scale


class Tied(nn.Module):
    """Reads through one module what it writes through another."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Module(), nn.Module()
        scale = torch.ones(WIDTH)
        self.left.register_buffer("scale", scale)
        self.right.register_buffer("scale", scale)

    def forward(self, x):
        self.left.scale.add_(x.detach().abs().mean(0))
        return x.square() * self.right.scale.clone()


class Absent(nn.Module):
    """Has a buffer that is None at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x):
        self.scale = x.detach().abs().mean(0) if self.scale is None else 2 * self.scale
        return x.square() * self.scale


class Coin(nn.Module):
    """Scales by a random number of a generator that is not torch's global one."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        # The number of tensors that autograd saves depends on the coin.
        return x.square() if self.draw() < 0.5 else x.tanh().square() * 3


class Dice(nn.Module):
    """Has a generator in an attribute."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x.square() * float(self.generator.random())


class Torch(Dice):
    """Has a generator of torch in an attribute."""

    def forward(self, x):
        return x.square() * torch.rand((), generator=self.generator)


class Count(nn.Module):
    """Scales by the number of its calls, which a function keeps anywhere."""

    def __init__(self, state, count):
        super().__init__()
        self.state = state
        self.count = count

    def forward(self, x):
        return x.square() * (1 + self.count(self) % 3)


def count_in_attribute(block):
    block.state += 1
    return block.state


def count_in_list(block):
    block.state.append(1)
    return len(block.state)


def count_in_dict(block):
    block.state["calls"] = block.state.get("calls", 0) + 1
    return block.state["calls"]


def count_in_set(block):
    block.state.add(len(block.state))
    return len(block.state)


def count_in_array(block):
    block.state[0] += 1
    return int(block.state[0])


def count_in_object(block):
    block.state.calls += 1
    return block.state.calls


def count_in_nested(block):
    block.state["inner"].calls.append(1)
    return len(block.state["inner"].calls)


def count_by_absence(block):
    if hasattr(block, "calls"):
        block.calls += 1
    else:
        block.calls = 1
    return block.calls


class Hidden(nn.Module):
    """Keeps a hidden state between batches, detached or not."""

    def __init__(self, is_detached):
        super().__init__()
        self.rnn = nn.GRUCell(WIDTH, WIDTH)
        self.hidden = None
        self.is_detached = is_detached

    def forward(self, x):
        hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach() if self.is_detached else hidden
        return hidden.square()


class Kept(nn.Module):
    """Keeps a tensor with its graph, for a further loss or a log."""

    def __init__(self):
        super().__init__()
        self.aux = None

    def forward(self, x):
        scale = 1.0 if self.aux is None else 1 + float(self.aux.detach())
        self.aux = x.softmax(-1).square().mean()
        return x.square() * scale


class Cached(nn.Module):
    """Makes a table in its first forward."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = (x.detach().abs().mean(0) + 1).log()
        return x.square() * self.table


BLOCKS = {
    "coin of Python": lambda: Coin(random.random),
    "coin of NumPy": lambda: Coin(np.random.rand),
    "coin of torch": lambda: Coin(lambda: float(torch.rand(()))),
    "random.Random": lambda: Dice(random.Random(0)),
    "np.random.Generator": lambda: Dice(np.random.default_rng(0)),
    "torch.Generator": lambda: Torch(torch.Generator().manual_seed(0)),
    "attribute": lambda: Count(0, count_in_attribute),
    "list": lambda: Count([], count_in_list),
    "deque": lambda: Count(deque(), count_in_list),
    "dict": lambda: Count({}, count_in_dict),
    "set": lambda: Count(set(), count_in_set),
    "array": lambda: Count(np.zeros(1), count_in_array),
    "object": lambda: Count(SimpleNamespace(calls=0), count_in_object),
    "nested": lambda: Count({"inner": SimpleNamespace(calls=[])}, count_in_nested),
    "absence": lambda: Count(None, count_by_absence),
    "hidden": lambda: Hidden(is_detached=True),
    "kept": Kept,
    "cached": Cached,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm by hooks": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "statistics": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative statistics": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "rebound": Rebound,
    "past versions": WrittenPastVersions,
    "late": Late,
    "tied": Tied,
    "absent": Absent,
}


def by_block(blocks):
    for block in blocks:
        block.forward = _checkpointed(block)


def by_segment(blocks):
    postpone(blocks, partial(_recomputed, blocks))


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm")
@pytest.mark.parametrize("change", [by_block, by_segment])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_computed_again_from_the_state_at_its_start(kind, backwards, calls, change):
    results = []
    for wrap in (list, change):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), BLOCKS[kind](), nn.Tanh()) for _ in range(2)]
        wrap(blocks)
        for _ in range(2):
            loss = 0.0
            for _ in range(calls):
                x = torch.randn(8, WIDTH)
                for block in blocks:
                    x = block(x)
                loss = loss + x.square().sum()
            for number in range(backwards):
                loss.backward(retain_graph=number + 1 < backwards)
        gradients = [parameter.grad for block in blocks for parameter in block.parameters()]
        buffers = [buffer for block in blocks for buffer in block.buffers()]
        next_numbers = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        results.append([*gradients, *buffers, next_numbers])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_buffers_keep_their_memory():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    buffers = dict(block.named_buffers())
    block.forward = _checkpointed(block)
    block(torch.randn(8, WIDTH)).sum().backward()
    assert all(buffer is buffers[name] for name, buffer in block.named_buffers())


@pytest.mark.parametrize("change", [by_block, by_segment])
def test_a_hidden_state_with_its_graph_has_the_gradients_of_the_plain_model(change):
    """Backpropagation through time, over the calls of a block in one update."""
    results = []
    for wrap in (list, change):
        torch.manual_seed(0)
        block = Hidden(is_detached=False)
        wrap([block])
        sum(block(torch.randn(8, WIDTH)).sum() for _ in range(3)).backward()
        results.append([parameter.grad for parameter in block.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("change", [by_block, by_segment])
def test_an_attribute_that_the_model_sets_for_each_call_is_read_again(change):
    results = []
    for wrap in (list, change):
        block = Coin(None)
        wrap([block])
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = x
        for number in (0, 1, 0, 1):
            block.draw = partial(float, number)
            y = block(y)
        y.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("change", [by_block, by_segment])
def test_graphs_of_earlier_updates_are_not_kept(change):
    block = Kept()
    change([block])
    references = []
    for _ in range(3):
        x = torch.randn(8, WIDTH, requires_grad=True)
        references.append(weakref.ref(x))
        block(x).sum().backward()
    del x
    assert [reference() is None for reference in references] == [True, True, False]


class Bank(nn.Module):
    """Reads further inputs of every form."""

    def forward(self, x, bank=None, banks=()):
        bank = banks[0] if bank is None else bank
        return x.square() * bank.square()


@pytest.mark.parametrize("change", [by_block, by_segment])
@pytest.mark.parametrize("form", ["position", "name", "nested"])
def test_an_input_that_is_written_before_the_backward_is_refused(form, change):
    block = nn.ModuleList([Bank()])[0]
    change([block])
    bank = torch.ones(WIDTH)
    x = torch.randn(8, WIDTH, requires_grad=True)
    match form:
        case "position":
            y = block(x, bank)
        case "name":
            y = block(x, bank=bank)
        case "nested":
            y = block(x, banks=[bank])
    bank.add_(1)
    with pytest.raises(RunnerError, match=r"written in place .*pass a copy"):
        _explained(torch.Tensor.backward)(y.sum())


class Enqueuing(nn.Module):
    """Reads a tensor in an attribute, which is no buffer."""

    def __init__(self, writes):
        super().__init__()
        self.bank = torch.ones(WIDTH)
        self.writes = writes

    def forward(self, x):
        y = x.square() * self.bank.clone()
        if self.writes:
            self.bank.add_(1)
        return y


@pytest.mark.parametrize("change", [by_block, by_segment])
def test_a_tensor_in_an_attribute_that_is_written_is_refused(change):
    block = Enqueuing(writes=True)
    change([block])
    x = torch.randn(8, WIDTH, requires_grad=True)
    with pytest.raises(RunnerError, match=r"writes to Enqueuing\.bank in place.*register_buffer"):
        block(x)
    block = Enqueuing(writes=False)
    change([block])
    y = block(x)
    block.bank.add_(1)
    with pytest.raises(RunnerError, match=r"Enqueuing\.bank was written in place before the backward"):
        y.sum().backward()


def test_other_shapes_in_the_second_computation_are_explained():
    state = {"calls": 0}

    def forward(x):
        state["calls"] += 1
        return x.square() if state["calls"] % 2 else x[:2].tanh().square()

    block = nn.Module()
    block.forward = forward
    block.forward = _checkpointed(block)
    loss = block(torch.randn(8, WIDTH, requires_grad=True)).sum()
    with pytest.raises(RunnerError, match=r"activation_checkpointing: .*neither an input nor an attribute"):
        _explained(torch.Tensor.backward)(loss)


def test_other_errors_of_a_backward_stay_as_they_are():
    x = torch.randn(8, WIDTH, requires_grad=True)
    loss = x.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        _explained(torch.Tensor.backward)(loss)
