"""Stages that promise the same algebra: equal in float64, in float32 as near to the truth as the baseline."""

import statistics

import pytest
import torch
from builders import build_masac, copy_state, parameters, train
from torch._dynamo.utils import counters

from runner.api import Progress
from runner.plugins.marl.stages.forward_cache import ForwardCacheConfig
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig
from runner.plugins.stages.compile import CompileConfig
from runner.plugins.stages.cuda_graph import CudaGraphConfig
from runner.plugins.stages.fused_optimizer import FusedOptimizerConfig


def stacked():
    return [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig()]


SMALLER = {"compile": 1, "compile, stacked": 2}
"""Agents where three cost too much: without stacking, each has three functions of its own to compile."""
COMBINATIONS = {
    "stacked_agents": stacked,
    "fused_optimizer": lambda: [FusedOptimizerConfig()],
    "compile": lambda: [CompileConfig()],
    "compile, stacked": lambda: [*stacked(), FusedOptimizerConfig(), CompileConfig()],
    "all but compile": lambda: [*stacked(), FusedOptimizerConfig()],
}
GRAPHS = {"compile": 3, "compile, stacked": 3}
"""How often something is compiled: every function once for an agent, or once for all of them; never anew."""
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def largest_difference(one, other):
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_float64_updates_agree_with_the_baseline(combination, device, request):
    if combination == "compile":  # C++ is made where agents are stacked, once instead of once for each
        request.getfixturevalue("traced_only")
    agents = SMALLER.get(combination, 3)
    baseline, staged = (
        build_masac(stages, agents, device, hidden=[16]) for stages in ([], COMBINATIONS[combination]())
    )
    graphs = counters["stats"]["unique_graphs"]
    expected, found = train(baseline, 10, agents), train(staged, 10, agents)
    assert largest_difference(parameters(baseline), parameters(staged)) < 1e-9
    for one, other in zip(expected, found, strict=True):
        assert largest_difference(one, other) < 1e-9
    assert counters["stats"]["unique_graphs"] - graphs == GRAPHS.get(combination, 0)


@pytest.mark.usefixtures("float64")
def test_stacked_agents_that_discount_differently_agree_with_the_baseline():
    settings = {"hidden": [16], "gamma": [0.98, 0.5], "initial_temperature": 0.1}
    baseline, staged = build_masac(**settings), build_masac(COMBINATIONS["all but compile"](), **settings)
    train(baseline, 10)
    train(staged, 10)
    assert largest_difference(parameters(baseline), parameters(staged)) < 1e-9


@pytest.mark.parametrize("combination", [name for name in COMBINATIONS if "compile" not in name])
def test_single_float32_updates_are_as_near_to_the_truth_as_the_baseline(combination):
    torch.set_default_dtype(torch.float64)
    try:
        truth = build_masac()
        train(truth, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    variants = {"baseline": build_masac(), "staged": build_masac(COMBINATIONS[combination]())}
    for learner in variants.values():
        train(learner, 1)  # makes the optimizers' state
    errors = {name: [] for name in variants}
    for state in range(12):
        for learner in variants.values():
            copy_state(truth, learner)
            train(learner, 1, seed=100 + state)
        replay_in_float64(truth, variants["baseline"], seed=100 + state)
        for name, learner in variants.items():
            errors[name].append(largest_difference(parameters(truth), parameters(learner)))
    ratio = statistics.median(s / b for s, b in zip(errors["staged"], errors["baseline"], strict=True))
    assert ratio <= 2


def replay_in_float64(learner, sampler, seed):
    """The same numbers as a float32 update sees, in float64; another learner samples the noise."""
    from builders import random_batch

    batch = random_batch(seed)
    noise = sampler.noise(batch, torch.Generator().manual_seed(seed))
    learner.slots.update(
        {name: tensor.double() for name, tensor in batch.items()},
        {name: tensor.double() for name, tensor in noise.items()},
        Progress("updates", 1),
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("float64")
def test_a_captured_update_agrees_with_the_plain_one():
    stages = [*stacked(), FusedOptimizerConfig(), CudaGraphConfig()]
    baseline, captured = build_masac(device="cuda"), build_masac(stages, device="cuda")
    train(baseline, 10)
    train(captured, 10)
    assert largest_difference(parameters(baseline), parameters(captured)) < 1e-9


def test_stacked_state_has_the_baseline_names_and_survives_a_round_trip():
    baseline, staged, again = build_masac(), build_masac(stacked()), build_masac(stacked(), seed=2)
    assert dict(baseline.named_parameters()).keys() == dict(staged.named_parameters()).keys()
    train(staged, 3)
    again.load_state_dict(staged.state_dict())
    train(staged, 2, seed=50)
    train(again, 2, seed=50)
    one, other = parameters(staged), parameters(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_parameter_shows_its_gradient():
    for learner in (build_masac(), build_masac(stacked())):
        train(learner, 1)
        assert all(gradient is not None and gradient.any() for gradient in learner.gradients().values())
