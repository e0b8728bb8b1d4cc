"""Memory beside the results of operators, against what torch's allocator reports."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from runner.memory.fake import fake_tensors
from runner.memory.module_stack import ModuleStack
from runner.memory.tracker import UpdateTracker

ATEN = torch.ops.aten
TYPES = [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "ge", "pow", "fmod", "remainder"]
ROWS = 512


def measured_peak(compute):
    """The most bytes that a function has in use beside what exists before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = compute()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    in_use = peak = 0
    for event in events:
        if event.name() == "[memory]":
            in_use += event.nbytes()
            peak = max(peak, in_use)
    del result
    return peak


def planned_peak(make_inputs, compute):
    """The same as the tracker counts it, without numbers."""
    tracker = UpdateTracker(torch.device("cpu"), ModuleStack())
    with fake_tensors(), tracker:
        inputs = make_inputs()
        existing = tracker.total
        tracker.reset_peak()
        result = compute(*inputs)
    del result
    return tracker.peak - existing


def check(make_inputs, compute, *, tolerance=64):
    inputs = make_inputs()
    measured = measured_peak(lambda: compute(*inputs))
    assert planned_peak(make_inputs, compute) == pytest.approx(measured, abs=tolerance)


@given(st.sampled_from(BINARY), st.sampled_from(TYPES), st.sampled_from(TYPES), st.booleans())
def test_operands_of_another_type_are_copied(name, first, second, is_row):
    if torch.bool in (first, second) and name in ("sub", "pow", "fmod", "remainder"):
        return

    def make_inputs():
        shape = (1, 64) if is_row else (ROWS, 64)
        return torch.ones(ROWS, 64, dtype=first), torch.ones(shape, dtype=second)

    check(make_inputs, getattr(torch, name))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_result_in_place_needs_the_copy_only(dtype):
    def make_inputs():
        return torch.ones(ROWS, 64), torch.ones(ROWS, 64, dtype=dtype)

    check(make_inputs, lambda accumulated, factor: accumulated.mul_(factor))


@given(st.sampled_from(TYPES), st.sampled_from([None, *TYPES]), st.sampled_from([None, 0, 1]))
def test_a_sum_of_another_type_copies_what_it_adds(dtype, wanted, dim):
    check(lambda: (torch.ones(ROWS, 64, dtype=dtype),), lambda x: x.sum(dim, dtype=wanted), tolerance=256)


LAYOUTS = {
    "expanded": lambda *shape: torch.rand(*shape[:-1], 1).expand(shape),
    "transposed": lambda *shape: torch.rand(*shape[:-2], shape[-1], shape[-2]).mT,
    "contiguous": torch.rand,
}
IMAGES = (8, 4, 16, 16)
POOLED = (8, 4, 8, 8)
LAYER = (64, 32)
OPERATORS = {
    "avg_pool2d": (IMAGES, lambda x: (x,), lambda x: ATEN.avg_pool2d(x, [2, 2])),
    "avg_pool2d_backward": (
        POOLED,
        lambda gradient: (gradient, torch.rand(IMAGES)),
        lambda gradient, x: ATEN.avg_pool2d_backward(gradient, x, [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    "max_pool2d": (IMAGES, lambda x: (x,), lambda x: ATEN.max_pool2d_with_indices(x, [2, 2])),
    "max_pool2d_backward": (
        POOLED,
        lambda gradient: (gradient, torch.rand(IMAGES), torch.zeros(POOLED, dtype=torch.int64)),
        lambda gradient, x, places: ATEN.max_pool2d_with_indices_backward(
            gradient, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        ),
    ),
    "layer_norm": (LAYER, lambda x: (x,), lambda x: ATEN.native_layer_norm(x, [32], None, None, 1e-5)),
    "layer_norm_backward": (
        LAYER,
        lambda gradient: (gradient, torch.rand(LAYER), torch.rand(64, 1), torch.rand(64, 1)),
        lambda gradient, x, mean, scale: ATEN.native_layer_norm_backward(
            gradient, x, [32], mean, scale, None, None, [True, False, False]
        ),
    ),
    "softmax": (LAYER, lambda x: (x,), lambda x: ATEN._softmax(x, -1, False)),
    "softmax_backward": (
        LAYER,
        lambda gradient: (gradient, torch.rand(LAYER)),
        lambda gradient, y: ATEN._softmax_backward_data(gradient, y, -1, torch.float32),
    ),
    "log_softmax": (LAYER, lambda x: (x,), lambda x: ATEN._log_softmax(x, -1, False)),
    "log_softmax_backward": (
        LAYER,
        lambda gradient: (gradient, torch.rand(LAYER)),
        lambda gradient, y: ATEN._log_softmax_backward_data(gradient, y, -1, torch.float32),
    ),
    "product": (LAYER, lambda x: (x, torch.rand(32, 8)), torch.mm),
    "linear": (LAYER, lambda x: (torch.rand(8), x, torch.rand(32, 8)), torch.addmm),
    "embedding_backward": (
        (16, 8, 32),
        lambda gradient: (gradient, torch.zeros(16, 8, dtype=torch.int64)),
        lambda gradient, rows: ATEN.embedding_dense_backward(gradient, rows, 10, -1, False),
    ),
    "threshold_backward": (
        LAYER,
        lambda gradient: (gradient, torch.rand(LAYER)),
        lambda gradient, x: ATEN.threshold_backward(gradient, x, 0),
    ),
    "relu": (LAYER, lambda x: (x,), torch.relu),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operands_that_are_not_contiguous_are_copied(name, layout):
    shape, make_others, compute = OPERATORS[name]
    check(lambda: make_others(LAYOUTS[layout](*shape)), compute)


USES = {
    "own gradients": lambda h: (h * 3) + (h * 4) + h.exp(),
    "a shared gradient": lambda h: h + h.sin(),
    "only the last is shared": lambda h: h.sin() + h,
    "views": lambda h: h.view(-1, 4).exp().view_as(h) + (h.mT * 2).mT,
    "products": lambda h: h @ h.mT.detach() @ h + h,
    "blocks": lambda h: reduce(lambda x, _: x + torch.tanh(x * x), range(4), h),
}


@pytest.mark.parametrize("name", USES)
def test_gradients_of_one_tensor_are_added_in_place(name):
    def make_inputs():
        return (torch.ones(ROWS, ROWS, requires_grad=True),)

    def compute(x):
        USES[name](x * 2).sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    check(make_inputs, compute)


def test_a_gradient_that_is_needed_later_is_not_changed():
    x = torch.ones(4, 4, requires_grad=True)
    with UpdateTracker(torch.device("cpu"), ModuleStack()):
        h = x * 2
        h.retain_grad()
        y = h.sin() + h
        y.retain_grad()
        (y * y).sum().backward()
    expected = torch.ones(4, 4, requires_grad=True)
    value = (expected * 2).sin() + expected * 2
    (value * value).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert torch.equal(y.grad, 2 * value)
    assert torch.equal(h.grad, expected.grad / 2)


def test_a_module_holds_no_gradient_until_its_other_inputs_have_one():
    class Block(nn.Module):
        def forward(self, x, shared):
            return torch.tanh(x * 2 + shared)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x):
            shared = x * 3
            for block in self.blocks:
                x = checkpoint(block, x, shared, use_reentrant=False)
            return x

    network = Network()

    def compute(x):
        network(x * 1).sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    def make_inputs():
        return (torch.ones(ROWS, ROWS, requires_grad=True),)

    inputs = make_inputs()
    measured = measured_peak(lambda: compute(*inputs))
    stack = ModuleStack()
    tracker = UpdateTracker(torch.device("cpu"), stack)
    with fake_tensors(), tracker:
        stack.name_modules({"model": network})
        inputs = make_inputs()
        existing = tracker.total
        tracker.reset_peak()
        compute(*inputs)
    assert tracker.peak - existing == pytest.approx(measured, rel=0.005)
