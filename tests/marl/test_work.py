from itertools import pairwise

import torch
from builders import ACTION, OBSERVATION, build_masac, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from runner.api import Progress
from runner.plugins.marl.stages.forward_cache import ForwardCacheConfig
from runner.plugins.marl.stages.merged_critic_loss import MergedCriticLossConfig
from runner.plugins.marl.stages.stacked_agents import StackedAgentsConfig
from runner.plugins.marl.work import ADAM_BYTES, POLYAK_BYTES, least_flop

SIZE = 32


def counted(stages, agents, hidden):
    learner = build_masac(stages, agents, hidden=hidden)
    batch = random_batch(0, agents, SIZE)
    with FlopCounterMode(display=False) as counter:
        learner.slots.update(batch, learner.noise(batch, torch.Generator().manual_seed(0)), Progress("updates", 1))
    return counter.get_total_flops()


@settings(max_examples=5)
@given(st.integers(2, 4), st.lists(st.integers(4, 24), min_size=1, max_size=3))
def test_the_textbook_does_what_the_formula_says_and_its_repeated_forwards(agents, hidden):
    actor = OBSERVATION * hidden[0] + sum(a * b for a, b in pairwise(hidden))
    actor += hidden[-1] * 2 * ACTION
    least = least_flop(agents, OBSERVATION, ACTION, hidden, SIZE)
    repeated = agents * SIZE * 4 * (agents - 1) * actor  # next and current actions, again for every other agent
    joint = agents * (OBSERVATION + ACTION)
    others = agents * SIZE * (4 * joint - 4 * ACTION) * hidden[0]  # gradients of inputs that nothing follows from
    assert least + repeated <= counted((), agents, hidden) <= least + repeated + others


def test_no_stage_does_less_than_the_formula():
    stages = [ForwardCacheConfig(), MergedCriticLossConfig(), StackedAgentsConfig()]
    assert counted(stages, 3, [16, 24]) <= counted((), 3, [16, 24])
    # A critic's last layer has one column, which stacked agents multiply without a matrix product.
    heads = 3 * SIZE * 24 * 24
    assert counted(stages, 3, [16, 24]) >= least_flop(3, OBSERVATION, ACTION, [16, 24], SIZE) - heads


def test_the_learner_says_both():
    learner = build_masac(agents=4, hidden=[256, 256])
    flop, moved = learner.least_work(128)
    assert flop == least_flop(4, OBSERVATION, ACTION, [256, 256], 128)
    parameters = sum(parameter.numel() for _, parameter in learner.named_parameters())
    assert ADAM_BYTES * parameters < moved < (ADAM_BYTES + POLYAK_BYTES) * parameters + 2**25
