"""What needs a GPU says so without one, and works with one."""

import types

import pytest
import torch
from builders import Holder, build_masac, random_batch, works
from running import tiny

from runner.api import Close, Exact, Progress, Setting, SourceConfig, Statistical
from runner.plugins.graphs.config import GcnConfig, PartitionedGcnConfig
from runner.plugins.stages.amp import AmpConfig
from runner.plugins.stages.async_transfer import AsyncTransferConfig
from runner.plugins.stages.compile import CompileConfig
from runner.plugins.stages.cuda_graph import CudaGraph, CudaGraphConfig
from runner.plugins.stages.fused_optimizer import FusedOptimizer
from runner.system.errors import UsageError
from runner.training.pipeline import setting_of

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Data(SourceConfig):
    """What stages ask a source."""

    kind = "data"
    implementation = "Missing"
    provides = "numbers"
    on_host: bool = False
    prioritized: bool = False
    ragged: bool = False

    @property
    def depends_on_feedback(self):
        return self.prioritized

    @property
    def shapes_vary(self):
        return self.ragged

    def resident(self, device):
        return device == "cpu" or not self.on_host


def setting(device, *, model=None, stages=None, **data):
    return Setting(model or GcnConfig(), Data(**data), torch.device(device), stages or {}, "updates")


def test_compile_for_a_gpu_is_inactive_on_a_cpu(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    only = CompileConfig(device="cuda")
    assert only.inactive(setting("cpu")) == "it compiles on cuda alone (device), and this is a cpu"
    assert only.inactive(setting("cuda")) is None
    assert CompileConfig().inactive(setting("cpu")) is None
    assert CompileConfig().inactive(setting("cuda")) is None


@pytest.mark.parametrize("name", ["shakespeare_gpt", "gpt2_small"])
def test_language_models_compile_on_a_gpu_alone(name):
    recipe = tiny(name)
    for device, is_active in (("cpu", False), ("cuda", True)):
        context = setting_of(recipe, torch.device(device))
        assert (recipe.stages["compile"].inactive(context) is None) == is_active


def test_async_transfer_says_when_there_is_nothing_to_transfer():
    stage = AsyncTransferConfig()
    assert "nothing to do on a CPU" in stage.inactive(setting("cpu"))
    assert "on the GPU already" in stage.inactive(setting("cuda"))
    assert stage.inactive(setting("cuda", on_host=True)) is None


def test_async_transfer_promises_the_same_bits_unless_batches_depend_on_updates():
    stage = AsyncTransferConfig()
    assert stage.contract(setting("cuda", on_host=True)) == Exact()
    lagging = setting("cuda", on_host=True, prioritized=True)
    assert stage.contract(lagging) == Statistical()
    stage.inactive(lagging)
    assert stage.contract(setting("cuda", on_host=True)) == Exact()  # asking changes nothing


def test_cuda_graph_needs_a_gpu_and_refuses_loss_scaling_and_shapes_that_vary():
    stage = CudaGraphConfig()
    assert "CUDA device" in stage.inactive(setting("cpu"))
    assert stage.inactive(setting("cuda")) is None
    assert stage.contract(setting("cuda")) == Close()
    with pytest.raises(UsageError, match="bf16"):
        stage.inactive(setting("cuda", stages={"amp": AmpConfig(dtype="fp16")}))
    with pytest.raises(UsageError, match="those of 'data' vary"):
        stage.inactive(setting("cuda", ragged=True))
    with pytest.raises(UsageError, match="those of 'partitioned_gnn' change"):
        stage.inactive(setting("cuda", model=PartitionedGcnConfig()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "order", [(FusedOptimizer(None)._fuse, CudaGraph._capturable), (CudaGraph._capturable, FusedOptimizer(None)._fuse)]
)
def test_optimizers_of_a_graph_have_their_rates_where_it_reads_them(monkeypatch, order, dtype):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch, "get_default_dtype", lambda: dtype)
    made = lambda optimizer, parameters, **settings: optimizer(parameters, **settings)  # noqa: E731
    for wrap in order:
        made = wrap(made)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], **own} for own in ({}, {"lr": 0.5})]
    optimizer = made(torch.optim.AdamW, groups, lr=0.1)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [float(rate) for rate in rates] == pytest.approx([0.1, 0.5])
    assert all(isinstance(rate, torch.Tensor) for rate in rates)
    for group in optimizer.param_groups:
        assert group["capturable"]
        assert group["fused"] is (True if dtype is torch.float32 else None)


@CUDA
def test_batches_that_were_drawn_ahead_are_the_same_ones_in_the_same_order():
    learner, progress = build_masac(device="cuda"), Progress("updates", 9)
    drawn = []

    def draw(size, progress):
        drawn.append(len(drawn))
        return random_batch(drawn[-1], size=size)

    learner.slots.define(draw=draw, next_batch=lambda: None)
    source = types.SimpleNamespace(ahead=lambda: 2 - (len(drawn) + 2) % 3)  # three belong together
    works(AsyncTransferConfig()).attach(Holder(learner, 32, source))
    for number in range(9):
        batch = learner.slots.next_batch(32, progress)
        expected = random_batch(number)
        assert all(torch.equal(batch[name].cpu(), expected[name]) for name in expected)
    assert len(drawn) == 9  # nothing was drawn beyond a burst
