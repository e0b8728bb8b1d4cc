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


@pytest.mark.parametrize(
    ("accumulated", "factor"),
    [
        (torch.float32, torch.bool),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.int64, torch.int32),
    ],
)
def test_a_result_in_place_needs_copies_only(accumulated, factor):
    def make_inputs():
        return torch.ones(ROWS, 64, dtype=accumulated), torch.ones(ROWS, 64, dtype=factor)

    check(make_inputs, lambda x, y: x.mul_(y))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2.0,
        lambda x: x * 2,
        lambda x: x / 2,
        lambda x: x > 0.5,
        lambda x: x + 0.5,
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: torch.div(x, 2, rounding_mode="trunc"),
    ],
)
def test_numbers_convert_tensors_like_tensors(compute, dtype):
    check(lambda: (torch.ones(ROWS, 64, dtype=dtype),), compute, tolerance=256)


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
    "expanded bias": (LAYER, lambda x: (torch.rand(1, 8).expand(64, 8), x, torch.rand(32, 8)), torch.addmm),
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


@pytest.mark.parametrize("name", ["avg_pool2d", "max_pool2d"])
def test_pooling_copies_no_image_whose_channels_are_last(name):
    _, _, compute = OPERATORS[name]
    check(lambda: (torch.rand(IMAGES).to(memory_format=torch.channels_last),), compute)


@pytest.mark.parametrize("formats", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("name", ["avg_pool2d_backward", "max_pool2d_backward"])
def test_gradients_of_pooling_have_the_format_of_the_image(name, formats):
    _, make_others, compute = OPERATORS[name]

    def make_inputs():
        tensors = make_others(torch.rand(POOLED))
        forms = [(torch.contiguous_format, torch.channels_last)[is_last] for is_last in formats]
        formed = [tensor.to(memory_format=form) for tensor, form in zip(tensors, forms, strict=False)]
        return (*formed, *tensors[2:])

    check(make_inputs, compute)


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


class SumOfSaved(torch.autograd.Function):
    """x y, with a backward pass that adds what it saved."""

    @staticmethod
    def forward(context, x, y):
        context.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(context, gradient):
        x, y = context.saved_tensors
        total = x + y
        return gradient * total * y, gradient * (x + y)


def gradients(x, *, keep):
    """Gradients by functions that use tensors again after they were added up."""
    h = x * 2
    total = SumOfSaved.apply(h, h + 1) + h
    kept = []
    if keep:
        h.retain_grad()
        total.register_hook(kept.append)
        total.grad_fn.register_hook(lambda inputs, _: kept.extend(inputs))
    loss = (total * total).sum()
    first, *_ = torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward()
    return [first, x.grad, *kept, *([h.grad] if keep else [])]


@pytest.mark.parametrize("keep", [False, True])
def test_a_tracked_pass_has_the_numbers_of_any_other(keep):
    with UpdateTracker(torch.device("cpu"), ModuleStack()):
        tracked = gradients(torch.full((4, 4), 3.0, requires_grad=True), keep=keep)
    expected = gradients(torch.full((4, 4), 3.0, requires_grad=True), keep=keep)
    for actual, reference in zip(tracked, expected, strict=True):
        assert torch.equal(actual, reference)


def test_copies_on_a_processor_take_nothing_of_a_gpu():
    tracker = UpdateTracker(torch.device("cuda"), ModuleStack())
    with fake_tensors(), tracker:
        result = torch.ones(ROWS, 64, dtype=torch.int64) * torch.ones(ROWS, 64)
    assert (tracker.peak, tracker.total) == (0, 0)
    del result


class Chain(nn.Module):
    """Modules of two inputs, a tensor that all of them share and the result of the one before."""

    def __init__(self, blocks, *, is_checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        shared = x * 3
        for block in self.blocks:
            x = checkpoint(block, x, shared, use_reentrant=False) if self.is_checkpointed else block(shared, x * 1)
        return x


class Sum(nn.Module):
    def forward(self, x, shared):
        return torch.tanh(x * 2 + shared)


class Detached(nn.Module):
    """Its first input gets no gradient."""

    def forward(self, shared, x):
        return torch.tanh(x + shared.detach())


def test_a_module_holds_no_gradient_until_its_other_inputs_have_one():
    network = Chain([Sum() for _ in range(6)], is_checkpointed=True)

    def compute(x):
        network(x * 1).sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    x = torch.ones(ROWS, ROWS, requires_grad=True)
    measured = measured_peak(lambda: compute(x))
    stack = ModuleStack()
    stack.name_modules({"model": network})
    tracker = UpdateTracker(torch.device("cpu"), stack)
    with fake_tensors(), tracker:
        x = torch.ones(ROWS, ROWS, requires_grad=True)
        existing = tracker.total
        tracker.reset_peak()
        compute(x)
    assert tracker.peak - existing == pytest.approx(measured, rel=0.005)


def test_a_module_is_left_although_its_first_input_has_no_gradient():
    network = Chain([Detached() for _ in range(4)])
    stack = ModuleStack()
    stack.name_modules({"model": network})
    seen = []
    with stack:
        start = torch.ones(4, 4, requires_grad=True) * 1
        start.register_hook(lambda _: seen.append(stack.holder.module))
        network(start).sum().backward()
    # Those after it have been left.
    assert seen
    assert set(seen) <= {"model", "model.blocks.0"}
