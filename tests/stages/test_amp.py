import types

import pytest
import torch
from builders import build_masac, random_batch, train, works
from running import train_here
from torch._dynamo.utils import counters

from runner.plugins.marl.stages.forward_cache import ForwardCacheConfig
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig
from runner.plugins.stages.amp import AmpConfig
from runner.plugins.stages.compile import CompileConfig
from runner.system.errors import UsageError

AMP = "optimization.amp=on"
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def setting(device="cpu"):
    return types.SimpleNamespace(device=torch.device(device), stages={})


def amp(dtype="bf16"):
    return AmpConfig(dtype=dtype)


def test_fp16_on_a_cpu_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match="dtype: bf16"):
        amp("fp16").inactive(setting())


def test_bf16_without_hardware_is_inactive_and_says_why(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert "AVX512-BF16" in amp().inactive(setting())
    has = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert amp().inactive(setting()) is None
    has["avx512_fp16"] = True
    assert amp().inactive(setting()) is None
    has["cpu_name"] = "Intel Xeon"
    assert "AMX" in amp().inactive(setting())
    has["amx_bf16"] = True
    assert amp().inactive(setting()) is None


@pytest.mark.parametrize("stacked", [False, True])
def test_hidden_layers_are_bf16_and_everything_that_must_be_is_float32(stacked):
    before = [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig()] if stacked else []
    learner = build_masac([*before, amp()])
    batch = random_batch(0)
    noise = learner.noise(batch, torch.Generator())
    q = learner.slots.critic_forward("online", batch["observation"].flatten(1), batch["action"].flatten(1), slice(None))
    assert q.dtype == torch.float32
    with learner.slots.precision():
        assert (torch.rand(2, 3) @ torch.rand(3, 2)).dtype == torch.bfloat16
    assert learner.slots.targets(batch, noise).dtype == torch.float32
    assert learner.slots.current_action(batch, noise, slice(None))[1].dtype == torch.float32
    train(learner, 2)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for _, p in learner.named_parameters())


def test_bf16_changes_results_only_by_rounding():
    plain, rounded = build_masac(), build_masac([amp()])
    expected, found = train(plain, 1)[0], train(rounded, 1)[0]
    assert expected["critic_loss"] != found["critic_loss"]
    assert torch.allclose(expected["critic_loss"], found["critic_loss"], rtol=0.02)


@CUDA
def test_fp16_scales_unscales_and_updates_once():
    stage = works(amp("fp16"))
    learner = build_masac([stage], device="cuda")
    train(learner, 5)
    assert stage.state_dict()["scaler"]["_growth_tracker"] == 5
    assert all(p.isfinite().all() for _, p in learner.named_parameters())


@pytest.mark.usefixtures("traced_only")  # the network below is compiled to C++, which takes a tenth of the time
def test_a_traced_bf16_update_is_the_plain_one_up_to_rounding():
    before = [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig(), amp()]
    plain = train(build_masac(before, hidden=[16]), 1)[0]
    again = [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig(), amp()]
    traced = train(build_masac([*again, CompileConfig()], hidden=[16]), 1)[0]
    assert torch.allclose(plain["critic_loss"], traced["critic_loss"], rtol=0.02)


@pytest.mark.usefixtures("migrated_workspace")
def test_a_compiled_bf16_training_is_the_plain_one_up_to_rounding(monkeypatch):
    """To the end, by C++: the one training of the tests whose loss functions are."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    few = ("data.limit={train: 0.3, held_out: 0.2}", "train.epochs=1")
    graphs = counters["stats"]["unique_graphs"]
    results = [train_here("mlp", *few, *sets) for sets in ((), (AMP,), (AMP, "optimization.compile=on"))]
    exact, plain, compiled = (result.metrics["train/loss"] for result in results)
    assert counters["stats"]["unique_graphs"] > graphs
    assert {report.kind for report in results[2].stages if report.active} >= {"amp", "compile"}
    assert exact != plain
    assert compiled == pytest.approx(plain, rel=0.02)
