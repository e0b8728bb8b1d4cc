"""The state of a learner has one layout with every stage, so that what was trained one way goes on another way."""

import copy

import pytest
import torch
from builders import build_masac, train
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.api import Stage
from runner.plugins.marl.stages.forward_cache import ForwardCacheConfig
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig
from runner.plugins.stages.fused_optimizer import FusedOptimizerConfig


class Capturable(Stage):
    """What cuda_graph does to optimizers; on a CPU the fused kernel alone lets itself be told so."""

    def attach(self, pipeline):
        pipeline.slots.wrap("make_optimizer", lambda make: lambda *args, **own: make(*args, **own, capturable=True))


OPTIMIZERS = {
    "plain": list,
    "fused": lambda: [FusedOptimizerConfig()],
    "capturable": lambda: [FusedOptimizerConfig(), Capturable(None)],
}
AGENTS = st.integers(1, 3)
UPDATES = st.integers(0, 2)


def stacked(optimizer="plain", **options):
    stages = [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig(), *OPTIMIZERS[optimizer]()]
    return build_masac(stages, **options)


def layout(state):
    """Keys, types and shapes, without values and without the optimizers' own ways to compute."""
    if isinstance(state, dict):
        return {key: layout(value) for key, value in state.items() if key not in ("fused", "capturable", "foreach")}
    if isinstance(state, list):
        return [layout(value) for value in state]
    return (state.shape, state.dtype) if isinstance(state, torch.Tensor) else type(state)


def assert_same_bits(one, other, path=""):
    if isinstance(one, dict | list):
        items = one.items() if isinstance(one, dict) else enumerate(one)
        assert len(one) == len(other), path
        for key, value in items:
            assert_same_bits(value, other[key], f"{path}/{key}")
    else:
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=10)
@given(agents=AGENTS, updates=UPDATES)
def test_stacked_agents_have_the_layout_of_the_baseline(optimizer, agents, updates):
    baseline, staged = build_masac(agents=agents), stacked(optimizer, agents=agents)
    train(baseline, updates, agents)
    train(staged, updates, agents)
    assert layout(staged.state_dict()) == layout(baseline.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=10)
@given(agents=AGENTS, updates=UPDATES, already=UPDATES)
def test_a_state_comes_back_from_stacked_agents_with_the_same_bits(optimizer, agents, updates, already):
    baseline, staged, again = build_masac(agents=agents), stacked(optimizer, agents=agents), build_masac(agents=agents)
    train(baseline, updates, agents)
    train(staged, already, agents, seed=9)
    train(again, already, agents, seed=7)
    staged.load_state_dict(baseline.state_dict())
    again.load_state_dict(staged.state_dict())
    assert_same_bits(baseline.state_dict(), again.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_moved_state_goes_on_as_where_it_came_from(optimizer):
    torch.set_default_dtype(torch.float64)
    try:
        baseline, staged = build_masac(), stacked(optimizer, seed=2)
        train(baseline, 3)
        staged.load_state_dict(baseline.state_dict())
        expected, found = train(baseline, 3, seed=5)[-1], train(staged, 3, seed=5)[-1]
        assert all(torch.allclose(expected[name], found[name], rtol=1e-7, atol=1e-7) for name in expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", [build_masac, stacked])
def test_a_state_is_cast_to_the_learner_s_own_precision(make):
    narrow = build_masac()
    train(narrow, 2)
    torch.set_default_dtype(torch.float64)
    try:
        wide = make(seed=2)
        wide.load_state_dict(narrow.state_dict())
        assert all(p.dtype == torch.float64 for p in wide.state_dict()["model"].values())
        train(wide, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    narrow.load_state_dict(wide.state_dict())
    train(narrow, 1)


@pytest.mark.parametrize(("optimizer", "setting"), [("fused", "fused"), ("capturable", "capturable")])
@pytest.mark.parametrize("make", [stacked, lambda optimizer: build_masac(OPTIMIZERS[optimizer]())])
def test_an_optimizer_keeps_its_own_kernels_when_it_takes_a_state(make, optimizer, setting):
    baseline, staged = build_masac(), make(optimizer)
    train(baseline, 1)
    staged.load_state_dict(baseline.state_dict())
    baseline.load_state_dict(staged.state_dict())
    for learner, expected in ((staged, True), (baseline, False)):
        for role in learner.roles.values():
            assert all(bool(group[setting]) == expected for o in role.optimizers for group in o.param_groups)


@pytest.mark.parametrize("make", [build_masac, stacked])
def test_a_loaded_state_shares_no_memory_with_what_it_was_loaded_from(make):
    source, target = make(), make(seed=2)
    train(source, 1)
    target.load_state_dict(source.state_dict())
    before = copy.deepcopy(target.state_dict())
    train(source, 1)
    assert_same_bits(before, target.state_dict())


def test_agents_that_took_different_numbers_of_steps_cannot_be_stacked():
    baseline = build_masac()
    train(baseline, 1)
    state = baseline.state_dict()
    for entry in state["roles"]["actor"]["optimizers"][1]["state"].values():
        entry["step"] += 1
    with pytest.raises(ValueError, match="different numbers of optimizer steps"):
        stacked().load_state_dict(state)
