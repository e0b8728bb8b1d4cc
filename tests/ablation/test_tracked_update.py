"""Memory of one update by slot and module, for learners of every kind."""

import gc

import pytest
import torch
from running import tiny
from torch import nn

from runner.ablation.memory import MemoryMeter, gradient_bytes
from runner.ablation.tracked_update import living_tensors, track_update
from runner.memory.call_stack import CallStack
from runner.memory.kinds import Holder
from runner.training.pipeline import assemble

LEARNERS = ("marl_baseline", "shakespeare_gpt", "graf")
BARE = {"graf": ["optimization.heap_retention=off"]}
OFF = {"shakespeare_gpt": ["optimization.amp=off", "optimization.fused_optimizer=off"]}


def meter(name, *sets, updates=1):
    recipe = tiny(name, *BARE.get(name, []), *OFF.get(name, []), *sets)
    meter = MemoryMeter(assemble(recipe), updates)
    meter.warm_up()
    return meter


@pytest.fixture(scope="module", params=LEARNERS)
def learner(request):
    return meter(request.param)


def test_two_measurements_of_one_update_are_equal(learner):
    (batch,) = learner.batches
    first, second = learner.tracked(batch), learner.tracked(batch)
    assert first.kinds == second.kinds
    assert first.holders == second.holders
    assert (first.update, first.resident, first.slot) == (second.update, second.resident, second.slot)
    assert learner.saved(batch).peak_holders == learner.saved(batch).peak_holders


def test_the_parts_add_up(learner):
    (batch,) = learner.batches
    peak = learner.tracked(batch)
    assert sum(peak.kinds.values()) == peak.total
    assert peak.update == max(sample.bytes for sample in peak.samples)
    assert sum(peak.holders.values()) <= peak.total
    # Gradients of before are state until they are freed; all else of the update has a holder.
    assert sum(peak.holders.values()) >= peak.update - gradient_bytes()
    saved = learner.saved(batch)
    assert 0 < saved.peak <= peak.update
    assert saved.held == 0


def test_holders_are_slots_and_modules_of_the_learner(learner):
    (batch,) = learner.batches
    peak = learner.tracked(batch)
    slots = {"update", *learner.pipeline.learner.config.slots}
    roots = learner.pipeline.learner.modules()
    names = {name.partition(".")[0] for name in roots}
    for holder in peak.holders:
        assert holder.slot in slots
        assert holder.module.startswith("(") or holder.module.partition(".")[0] in names
    assert any(not holder.module.startswith("(") for holder in peak.holders)


@pytest.mark.parametrize(
    ("stage", "name"),
    [("activation_checkpointing", "shakespeare_gpt"), ("gradient_accumulation={micro_batch: 1}", "shakespeare_gpt"),
     ("activation_checkpointing", "mamba2_shakespeare")],
)  # fmt: skip
def test_stages_that_save_memory_do_so(stage, name):
    stage = stage if "=" in stage else f"{stage}=on"
    sets = ["model.layers=4", "train.batch_size=8", *(f"optimization.{kind}=off" for kind in tiny(name).stages)]
    baseline = meter(name, *sets).measure()
    changed = meter(name, *sets, f"optimization.{stage}").measure()
    assert changed.update < 0.9 * baseline.update
    assert changed.saved < 0.8 * baseline.saved


def test_a_stage_with_nothing_to_do_changes_nothing():
    baseline = meter("shakespeare_gpt").measure()
    idle = meter("shakespeare_gpt", "optimization.gradient_accumulation={micro_batch: 4}").measure()
    assert (idle.update, idle.saved, idle.tracked) == (baseline.update, baseline.saved, baseline.tracked)


def test_a_module_that_fails_leaves_the_stack_empty():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    module = nn.Sequential(nn.Linear(2, 2), Fails())
    stack = CallStack.of({"net": module})
    with pytest.raises(ZeroDivisionError), stack.watching():
        module(torch.ones(1, 2))
    assert stack.holder == Holder("update", "(no module)")
    assert not stack.recording


def test_labels_do_nothing_outside_of_a_measurement():
    stack = CallStack({})
    with stack.label("loss"):
        assert stack.holder.slot == "update"
    with stack.watching(), stack.label("loss"):
        assert stack.holder.slot == "loss"
        with stack.label("backward"):
            assert stack.holder == ("loss", "(backward)")
    assert stack.holder.slot == "update"


def test_tensors_of_a_compiler_do_not_count():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(10)
    meta = torch.ones(10, device="meta")
    real = torch.ones(10)
    addresses = {id(tensor) for tensor in living_tensors()}
    assert id(real) in addresses
    assert not addresses & {id(fake), id(meta)}
    gc.collect()


@pytest.mark.parametrize("count", [1, 50, 3_000])
def test_a_measurement_keeps_no_tensor_alive(count):
    """Gradients that an update frees do not count any more, as they would if the tracker held them."""
    measured = meter("shakespeare_gpt")
    parameters = [parameter for _, parameter in measured.pipeline.learner.named_parameters()]
    gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    kept = []

    def free_and_allocate():
        for parameter in parameters:
            parameter.grad = None
        kept.append(torch.ones(count))

    peak = track_update(measured.pipeline, measured.stack, free_and_allocate)
    assert gradients > 4 * 50
    # Other tests have gradients, too, which stay.
    first, last = peak.samples[0].bytes, peak.samples[-1].bytes
    assert first - last == gradients - 4 * count
    assert peak.update == max(first, last)
