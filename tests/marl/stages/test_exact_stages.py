"""Stages that promise the same bits keep them."""

import pytest
import torch
from builders import build_masac, moments, parameters, train, works

from runner.plugins.marl.stages.forward_cache import ForwardCacheConfig
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig

UPDATES = 5
COMBINATIONS = {
    "forward_cache": lambda: [ForwardCacheConfig()],
    "merged_critic_loss": lambda: [MergedCriticLossConfig()],
    "both": lambda: [ForwardCacheConfig(), MergedCriticLossConfig()],
}


@pytest.mark.parametrize("agents", [1, 2, 4])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_parameters_moments_and_outputs_are_bitwise_equal_to_the_baseline(combination, agents):
    baseline, staged = build_masac(agents=agents), build_masac(COMBINATIONS[combination](), agents=agents)
    expected, found = train(baseline, UPDATES, agents), train(staged, UPDATES, agents)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    for state in (parameters, moments):
        one, other = state(baseline), state(staged)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_baseline_repeats_itself():
    first, second = build_masac(), build_masac()
    train(first, UPDATES)
    train(second, UPDATES)
    one, other = parameters(first), parameters(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_cache_computes_every_policy_once_per_update_and_forgets():
    stage = works(ForwardCacheConfig())
    learner = build_masac([stage], agents=4)
    calls = []
    forward = learner.slots.actor_forward
    learner.slots.replace("actor_forward", lambda seen, agents: calls.append(agents) or forward(seen, agents))
    train(learner, 1, agents=4)
    assert len(calls) == 1 + 4  # next actions of all at once, current actions of each
    assert stage.next is None
    assert not stage.current


@pytest.mark.parametrize("stacked", [False, True])
def test_critics_get_no_gradient_from_the_actor_loss(stacked):
    learner = build_masac([ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig()] if stacked else [])
    seen = []
    step = learner.slots.actor_loss

    def actor_loss(*args):
        seen.append(any(p.requires_grad for p in learner.roles["critic"].leaves()))
        return step(*args)

    learner.slots.replace("actor_loss", actor_loss)
    train(learner, 1)
    assert seen == [False] * (1 if stacked else 3)
    assert all(p.requires_grad for p in learner.roles["critic"].leaves())
