"""Memory of compiled updates, predicted from generated code whose kernels do nothing."""

import random
from dataclasses import replace

import pytest
import torch
from running import tiny
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.checkpoint import checkpoint

from runner.memory.compiled import CompiledStack, CompiledTracker, generated_code
from runner.memory.fake import fake_tensors
from runner.memory.kinds import Kind, by_kind
from runner.system.errors import RunnerError, UsageError
from runner.training import planning
from runner.training.planning import plan_memory

CPU = torch.device("cpu")
COMPILED = "optimization.compile=on"
FLOAT = 4
"""Bytes of a number."""


def chain(tensor):
    return (tensor.sin() + 1).square().exp() - tensor


def allocated_bytes(tracker, step, shape):
    """Returns the bytes that a call allocates beyond its argument."""
    tensor = torch.empty(shape)
    tracker.reset_peak()
    before = tracker.total
    result = step(tensor)
    assert result.shape == tensor.shape
    return tracker.peak - before


def test_fused_operations_allocate_their_result_only():
    numbers = random.Random(7)
    shapes = [(numbers.randint(2, 4096), numbers.randint(2, 4096)) for _ in range(60)]
    tracker = CompiledTracker(CPU, CompiledStack())
    with fake_tensors(), tracker, generated_code():
        compiled = torch.compile(chain, dynamic=True)
        allocated_bytes(tracker, compiled, (5, 7))
        for shape in shapes:
            size = FLOAT * shape[0] * shape[1]
            assert allocated_bytes(tracker, compiled, shape) == size
            assert allocated_bytes(tracker, chain, shape) == 2 * size


def test_random_numbers_of_checkpointed_code_are_planned():
    def sampled(rows):
        return rows * torch.multinomial(rows.softmax(1), 1)

    tracker = CompiledTracker(CPU, CompiledStack())
    with fake_tensors(), tracker, generated_code():
        rows = torch.ones(64, 8, requires_grad=True)
        compiled = torch.compile(lambda x: checkpoint(sampled, x * 2, use_reentrant=False).sum())
        compiled(rows).backward()
    assert tracker.peak > 0


def test_nothing_of_the_generated_code_remains():
    functions = torch._C._dynamo.guards
    originals = functions._empty_strided_cpu, functions._reinterpret_tensor, AsyncCompile.cpp_pybinding
    with fake_tensors(), CompiledTracker(CPU, CompiledStack()), generated_code():
        torch.compile(chain)(torch.empty(3))
        assert AsyncCompile.cpp_pybinding != originals[2]
        assert PyCodeCache.modules
    assert not PyCodeCache.modules
    remaining = functions._empty_strided_cpu, functions._reinterpret_tensor, AsyncCompile.cpp_pybinding
    assert remaining == originals


def test_a_compiled_plan_counts_the_generated_code():
    recipe = tiny("digits_classifier", COMPILED)
    before = torch.get_rng_state()
    estimate = plan_memory(recipe)
    plan = plan_memory(recipe, compiled=True)

    assert "compile" in plan.stages
    assert "compile" in estimate.left_out
    assert plan.peak != estimate.peak
    assert plan.peak == pytest.approx(estimate.peak, rel=0.3)
    for kind in (Kind.parameters, Kind.optimizer):
        assert by_kind(plan.usage)[kind] == by_kind(estimate.usage)[kind]
    assert "within 5%" in plan.lines()[0]
    assert "an estimate without the compiler" in estimate.lines()[0]
    assert (plan.data()["tolerance"], estimate.data()["tolerance"]) == (0.05, None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("sets", "device", "message"),
    [
        ([], "cpu", "no stage compiles anything"),
        ([COMPILED], "cuda", "plans for a CPU only, not for cuda"),
        (["optimization.compile={device: cuda}"], "cpu", "no stage compiles anything on a CPU"),
        (["optimization.compile={mode: max-autotune-no-cudagraphs}"], "cpu", "compile measures"),
    ],
)
def test_what_cannot_be_planned_is_refused(sets, device, message):
    recipe = replace(tiny("digits_classifier", *sets), device=device)
    with pytest.raises(UsageError, match=message):
        plan_memory(recipe, compiled=True)


def test_a_compiler_that_is_inactive_on_the_device_makes_no_estimate():
    plan = plan_memory(tiny("shakespeare_gpt"))
    assert "within 5%" in plan.lines()[0]
    assert "compile" not in plan.left_out


def test_a_compiled_update_that_needs_numbers_is_refused(monkeypatch):
    def fail(*_arguments, **_options):
        raise DataDependentOutputException(torch.ops.aten.nonzero.default)

    monkeypatch.setattr(planning, "_highest_usage", fail)
    with pytest.raises(RunnerError, match=r"cannot be planned \(aten.nonzero.default\); plan it without"):
        plan_memory(tiny("digits_classifier", COMPILED), compiled=True)
