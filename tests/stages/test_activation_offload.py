"""Offloaded activations return with the same bits, and wrong targets are rejected."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import offload_targets
import pytest
import tiny_learners
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_targets import Copies, OffloadHere, OffloadHereConfig
from running import tiny
from test_every_stage_and_learner import recipe_of
from torch import nn

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.stages.activation_offload import ActivationOffloadConfig, PinnedMemory
from runner.proof.verdict import Outcome
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.timed_gate import quick

REGISTRY = Registry([Path(tiny_learners.__file__), Path(offload_targets.__file__)])
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def verdict(kind, learner, folder):
    recipe = recipe_of(learner, folder, f"optimization.{kind}=on", registry=REGISTRY)
    return quick(recipe, REGISTRY, [kind])


def test_the_gate_passes_offloading(tmp_path):
    assert verdict("offload_copies", "images", tmp_path).outcome is Outcome.PASS


@pytest.mark.parametrize("learner", tiny_learners.RECIPES)
@pytest.mark.parametrize("kind", ["offload_copies", "offload_bytes"])
def test_updates_of_every_learner_have_the_same_bits(kind, learner, tmp_path):
    parameters = []
    for sets in ([], [f"optimization.{kind}=on"]):
        pipeline = assemble(recipe_of(learner, tmp_path, *sets, registry=REGISTRY), REGISTRY.files)
        step = Step(pipeline)
        for _ in range(3):
            step()
        modules = pipeline.learner.modules().values()
        parameters.append([tensor for module in modules for tensor in module.state_dict().values()])
    assert pipeline.stages[kind].moved_bytes > 0
    assert all(map(torch.equal, *parameters))


@pytest.mark.parametrize("kind", ["offload_half", "offload_one_buffer", "offload_late"])
def test_a_wrong_target_is_rejected(kind, tmp_path):
    assert verdict(kind, "images", tmp_path).outcome is Outcome.FAIL


@pytest.mark.parametrize("name", ["shakespeare_gpt", "gps_esol"])
def test_offloading_works_with_checkpoints_and_micro_batches(name):
    together = ("gradient_accumulation={micro_batch: 2}", "activation_checkpointing=on", "offload_copies=on")
    recipe = tiny(name, *(f"optimization.{stage}" for stage in together), registry=REGISTRY)
    pipeline = assemble(recipe, REGISTRY.files)
    Step(pipeline)()
    assert pipeline.stages["offload_copies"].moved_bytes > 0


def attached(module, smallest=0):
    """Returns the stage and an update of a module that it wraps."""
    slots = SimpleNamespace(wrap=lambda name, wrapper: wrappers.append(wrapper))
    wrappers = []
    learner = SimpleNamespace(modules=lambda: {"model": module})
    stage = OffloadHere(OffloadHereConfig(smallest=smallest))
    stage.attach(SimpleNamespace(learner=learner, slots=slots, device=torch.device("cpu")))

    def update(step, batch):
        return wrappers[0](lambda batch, noise: step(batch))(batch, {})

    return stage, update


def gradients(module, step, batch, update=None):
    module.zero_grad()
    if update is None:
        step(batch)
    else:
        update(step, batch)
    return [parameter.grad.clone() for parameter in module.parameters()]


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(len(x), -1),
    "strided": lambda x: torch.cat([x, x], 1)[:, ::2],
    "offset": lambda x: torch.cat([x, x])[len(x) :],
}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 5),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    smallest=st.sampled_from([0, 1, 40, 10**9]),
)
def test_gradients_have_the_same_bits_for_all_layouts_and_sizes(rows, width, layout, dtype, smallest):
    torch.manual_seed(rows * 10 + width)
    module = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 3)).to(dtype)
    batch = LAYOUTS[layout](torch.randn(rows, width, dtype=dtype))
    weight = torch.rand(rows, 3, dtype=dtype)

    def step(x):
        torch.manual_seed(1)
        y = module(LAYOUTS[layout](2 * x))
        (y.softmax(-1) * weight + y.square()).sum().backward()

    stage, update = attached(module, smallest)
    expected = gradients(module, step, batch)
    actual = gradients(module, step, batch, update)
    assert all(map(torch.equal, actual, expected))
    assert (stage.moved_bytes == 0) == (smallest == 10**9) or smallest == 40


def test_activations_are_freed_until_the_backward_pass():
    module = nn.Linear(8, 8)
    stage, update = attached(module)
    alive = []

    def step(x):
        hidden = module(x).tanh()
        output = hidden.sigmoid()
        storages = [weakref.ref(tensor) for tensor in (hidden, output)]
        total = output.sum()
        del hidden, output
        gc.collect()
        alive.extend(storage() is not None for storage in storages)
        total.backward()

    update(step, torch.randn(4, 8))
    assert alive == [False, False]
    assert stage.closing_notes()[0].endswith("were moved")


def test_parameters_and_the_batch_stay():
    """Autograd saves both for the backward pass of a linear layer."""
    module = nn.Linear(8, 8, bias=False)
    stage, update = attached(module)
    x = torch.randn(4, 8, requires_grad=True)
    update(lambda batch: module(batch).sum().backward(), x)
    assert stage.moved_bytes == 0


def test_a_cpu_is_named_as_the_reason_and_compilers_are_refused():
    config = ActivationOffloadConfig()
    on_cpu = SimpleNamespace(device=torch.device("cpu"), stages={})
    assert config.inactive(on_cpu) == "activations are in the memory of the host already"
    on_gpu = SimpleNamespace(device=torch.device("cuda"), stages={})
    assert config.inactive(on_gpu) is None
    for kind in ("compile", "cuda_graph"):
        with pytest.raises(UsageError, match=f"{kind} decides itself"):
            config.inactive(SimpleNamespace(device=torch.device("cuda"), stages={kind: None}))


@CUDA
def test_a_gpu_copies_without_waiting_and_returns_the_same_bits():
    target = PinnedMemory(torch.device("cuda"))
    for shape in ((3,), (1000, 1000), (64, 3, 32, 32)):
        tensor = torch.randn(shape, device="cuda")
        expected = tensor.cpu()
        stored = target.store(tensor)
        assert stored.tensor.is_pinned()
        del tensor
        torch.randn(shape, device="cuda")  # reuses freed memory
        assert torch.equal(target.load(stored).cpu(), expected)


def test_a_copy_keeps_strides():
    for tensor in (torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        target = Copies()
        assert target.load(target.store(tensor)).stride() == tensor.stride()
