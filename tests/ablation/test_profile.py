"""Where the time of an update goes: measured, shown, and said by the verb."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from running import RECIPES, TINY, runner, tiny
from torch.autograd import DeviceType

from runner.ablation.profile import (
    PYTHON,
    STEP,
    Burst,
    HostSync,
    OperatorTime,
    Profile,
    SlotTime,
    profile,
    show,
    tables,
)  # fmt: skip
from runner.plugin.registry import Registry
from runner.system.console import Console
from runner.system.errors import StorageError, UsageError
from runner.tracking import Workspace
from runner.training.pipeline import assemble

UPDATES = 3


def small(*sets):
    return tiny("marl_baseline", "data.followers=1", "model.hidden=[8]", *sets)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return profile(small(), Registry(), Workspace(tmp_path_factory.mktemp("cost")), None, updates=UPDATES, warmup_s=0.5)


def test_every_slot_of_the_story_is_called_once_in_an_update(measured):
    names = [STEP, "next_batch", "draw", "transfer", "update"]
    story = ["targets", "critic_step", "actor_step", "temperature_step", "target_step"]
    assert [slot.name for slot in measured.slots] == names + story
    assert {slot.calls for slot in measured.slots} == {1.0}
    assert {slot.device_ms for slot in measured.slots} == {None}


def test_the_slots_own_times_add_up_to_the_whole_step(measured):
    times = {slot.name: slot for slot in measured.slots}
    assert sum(slot.self_ms for slot in measured.slots) == pytest.approx(times[STEP].total_ms)
    story = sum(slot.total_ms for slot in measured.slots[5:])
    assert times["update"].total_ms == pytest.approx(times["update"].self_ms + story)


def test_operators_are_sorted_and_are_the_whole_step(measured):
    spent = [operator.self_ms for operator in measured.operators]
    assert spent == sorted(spent, reverse=True)
    names = {operator.name for operator in measured.operators}
    assert {PYTHON, "aten::addmm", "aten::mm"} <= names
    assert not [name for name in names if name.startswith("slot ")]
    assert sum(operator.share for operator in measured.operators) == pytest.approx(1, abs=0.05)


def test_values_that_the_host_reads_are_counted_once(tmp_path):
    burst = Burst(assemble(small()), UPDATES)
    burst()  # an optimizer may read its settings the first time
    before = items_of_targets(burst, tmp_path / "before.json")

    def reads(step):
        def targets(*args):
            torch.ones(2).sum().item()
            return step(*args)

        return targets

    burst.pipeline.slots.wrap("targets", reads)
    burst.pipeline.slots.surround("targets", partial(burst.label, "targets"))
    assert items_of_targets(burst, tmp_path / "after.json") - before == 1


def items_of_targets(burst, trace):
    _, events = burst.profiled(trace)
    _, _, syncs = tables(events, burst.names, UPDATES, False)
    return sum(sync.calls for sync in syncs if sync.slot == "targets" and sync.waits)


def test_the_trace_is_a_chrome_trace_with_the_slots(measured):
    events = json.loads(measured.trace.read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert names.count("slot critic_step") == UPDATES
    assert measured.trace.parent.parent.name == "profiles"
    assert measured.trace.parent.name.startswith("marl_baseline-")


def test_a_slot_inside_a_compiled_one_is_not_called_by_itself(tmp_path):
    pipeline = assemble(small())
    burst = Burst(pipeline, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        _, events = burst.profiled(tmp_path / "trace.json")
    slots, _, _ = tables(events, burst.names, 1, False)
    assert {slot.calls for slot in slots if slot.name != STEP} == {0.0}


def event(name, start, end, *, thread=1, kernels=(), device=DeviceType.CPU, own=0.0, annotation=False):
    return SimpleNamespace(
        name=name, thread=thread, kernels=kernels, device_type=device, self_cpu_time_total=own,
        is_user_annotation=annotation, time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
    )  # fmt: skip


def kernel(name, duration):
    return SimpleNamespace(name=name, duration=duration)


@pytest.fixture
def of_a_gpu():
    """Two updates' events: the backward pass in thread 2, kernels that end after their slot, a sync after the step."""
    events = [
        event("slot step", 0, 100, annotation=True),
        event("slot update", 10, 90, annotation=True),
        event("slot critic_step", 20, 60, annotation=True),
        event("aten::mm", 25, 30, kernels=[kernel("gemm", 400.0)], own=5.0),
        event("MmBackward0", 35, 50, thread=2, kernels=[kernel("gemm", 600.0)], own=15.0),
        event("cudaStreamSynchronize", 70, 80, own=10.0),
        event("aten::_local_scalar_dense", 69, 81, kernels=[kernel("Memcpy DtoH (Device -> Pageable)", 2.0)], own=2.0),
        event("cudaDeviceSynchronize", 110, 120, own=10.0),
        event("gemm", 200, 600, device=DeviceType.CUDA),
        event("gemm", 600, 1200, device=DeviceType.CUDA),
        event("Memcpy DtoH (Device -> Pageable)", 1200, 1202, device=DeviceType.CUDA),
        event("slot critic_step", 200, 1200, device=DeviceType.CUDA, annotation=True),
    ]
    return tables(events, (STEP, "update", "critic_step", "target_step"), 2, True)


def test_kernels_of_a_backward_pass_in_another_thread_belong_to_the_slot_that_waits(of_a_gpu):
    found = {slot.name: slot for slot in of_a_gpu[0]}
    assert found["critic_step"] == SlotTime("critic_step", 0.5, 0.02, 0.02, 0.5)
    assert found["update"] == SlotTime("update", 0.5, 0.04, 0.02, 0.501)
    assert found["target_step"] == SlotTime("target_step", 0, 0, 0, 0)


def test_on_a_gpu_what_waits_inside_an_update_is_counted_and_nothing_else(of_a_gpu):
    assert of_a_gpu[2] == [
        HostSync("cudaStreamSynchronize", "update", 0.5, True),
        HostSync("Memcpy DtoH (Device -> Pageable)", "update", 0.5, False),
        HostSync("aten::_local_scalar_dense", "update", 0.5, False),
    ]


def test_kernels_have_shares_of_their_own(of_a_gpu):
    kernels = {each.name: each for each in of_a_gpu[1] if each.device == "cuda"}
    assert kernels["gemm"] == OperatorTime("gemm", "cuda", 1.0, 0.5, 1000 / 1002)
    assert "slot critic_step" not in kernels


def shown(result, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show(result, console)
    return console.file.getvalue()


GPU = Profile(
    recipe="mine", device="cuda:0", threads=4, batch_size=128, updates=5, steady=False, warmup_s=60.0,
    update_ms=1.0, profiled_update_ms=1.5,
    slots=(SlotTime(STEP, 1, 1.5, 0.5, 0.8), SlotTime("update", 1, 1.0, 1.0, 0.8), SlotTime("targets", 0, 0, 0, 0)),
    operators=(OperatorTime("gemm", "cuda", 9, 0.8, 1.0), OperatorTime("aten::mm", "cpu", 9, 0.3, 0.2)),
    syncs=(HostSync("cudaStreamSynchronize", "update", 2.0, True),), trace=Path("folder/trace.json"),
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_terminal(width):
    said = shown(GPU, width)
    assert max(map(len, said.splitlines())) <= max(
        width, len("trace: folder/trace.json (open it in https://ui.perfetto.dev)")
    )
    assert "host syncs: 2 per update" in said
    assert "kernels on the GPU" in said
    assert "not called by themselves: targets" in said
    assert "not steady after 60 s" in " ".join(said.split())
    assert ("calls" in said.partition("self ms")[0]) == (width >= 100)


def test_it_is_said_when_the_driver_tells_nothing():
    assert "reported no kernels" not in shown(GPU, 120)
    assert "reported no kernels" in shown(replace(GPU, operators=()), 120)


def test_on_a_cpu_it_is_said_that_nothing_waits_there(measured):
    said = " ".join(shown(measured, 120).split())
    assert "(each would stall a GPU)" in said
    assert "GPU ms" not in said
    assert "not called" not in said


def test_the_overhead_of_the_profiler_is_why_not_faster():
    assert GPU.profiler_overhead == 0.5
    assert "+50%" in shown(GPU, 80)
    assert replace(GPU, profiled_update_ms=1.0).data()["profiler_overhead"] == 0.0


def test_a_trace_is_never_overwritten(tmp_path):
    (tmp_path / "trace.json").write_text("mine")
    with pytest.raises(UsageError, match="holds a trace"):
        profile(small(), Registry(), Workspace(), tmp_path)
    assert (tmp_path / "trace.json").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file.*--out"):
        profile(small(), Registry(), Workspace(), tmp_path / "file" / "below")


def test_the_verb_prints_one_json_object(tmp_path):
    sets = [part for setting in (*TINY, "data.followers=1", "model.hidden=[8]") for part in ("--set", setting)]
    arguments = ("--updates", "2", "--warmup", "0.2", "--out", str(tmp_path / "out"), "--json")
    child = runner("profile", str(RECIPES / "marl_baseline.yaml"), *sets, *arguments)
    assert child.returncode == 0, child.stderr
    assert {line.partition(":")[0] for line in child.stderr.splitlines()} == {"runner profile"}
    data = json.loads(child.stdout)
    assert {"slots", "operators", "host_syncs", "trace", "update_ms", "profiler_overhead"} <= data.keys()
    assert data["trace"] == str(tmp_path / "out" / "trace.json")
    assert data["updates"] == 2
    assert data["host_syncs"]["per_update"] == sum(
        each["calls"] for each in data["host_syncs"]["found"] if each["waits"]
    )


def test_the_verb_says_a_mistake_without_a_traceback():
    child = runner("profile", "marl_basline")
    assert child.returncode == 2
    assert "marl_basline" in child.stderr
    assert "Traceback" not in child.stderr
