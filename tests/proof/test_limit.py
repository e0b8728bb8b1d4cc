from itertools import pairwise

import pytest
import torch
from builders import ACTION, OBSERVATION, build_masac, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from runner.plugins.stages.forward_cache import ForwardCache
from runner.plugins.stages.merged_critic_loss import MergedCriticLoss
from runner.plugins.stages.stacked_agents import StackedAgents
from runner.proof import limit
from runner.proof.limit import Rates, masac_flop, measure, work

SIZE = 32


def counted(stages, agents, hidden):
    learner = build_masac(stages, agents, hidden=hidden)
    noise = learner.noise(SIZE, torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        learner.slots.update(random_batch(0, agents), noise)
    return counter.get_total_flops()


@settings(max_examples=5)
@given(st.integers(2, 4), st.lists(st.integers(4, 24), min_size=1, max_size=3))
def test_the_textbook_does_what_the_formula_says_and_its_repeated_forwards(agents, hidden):
    actor = OBSERVATION * hidden[0] + sum(a * b for a, b in pairwise(hidden))
    actor += hidden[-1] * 2 * ACTION
    least = masac_flop(agents, OBSERVATION, ACTION, hidden, SIZE)
    repeated = agents * SIZE * 4 * (agents - 1) * actor  # next and current actions, again for every other agent
    joint = agents * (OBSERVATION + ACTION)
    others = agents * SIZE * (4 * joint - 4 * ACTION) * hidden[0]  # gradients of inputs that nothing follows from
    assert least + repeated <= counted((), agents, hidden) <= least + repeated + others


def test_no_stage_does_less_than_the_formula():
    stages = [ForwardCache(None), MergedCriticLoss(None), StackedAgents(None)]
    assert counted(stages, 3, [16, 24]) <= counted((), 3, [16, 24])
    # A critic's last layer has one column, which stacked agents multiply without a matrix product.
    heads = 3 * SIZE * 24 * 24
    assert counted(stages, 3, [16, 24]) >= masac_flop(3, OBSERVATION, ACTION, [16, 24], SIZE) - heads


def test_the_limit_is_what_takes_longer():
    shapes = {"observation": [4, 7], "action": [4, 2]}
    found = work("masac", shapes, [256, 256], {"flop": 1_600_913_408, "parameters": 891_932}, 128)
    assert found.least_flop == 1_163_132_928
    fast_memory = Rates(1e11, 2e11, 1e-7, 1e15)
    assert found.limit_s(fast_memory) == pytest.approx(found.least_flop / 2e11)
    assert found.limit_s(Rates(1e11, 2e11, 1e-3, 1e15)) == pytest.approx(found.least_flop / 1e11)  # 2e11 is not float32
    assert found.limit_s(Rates(1e15, 1e15, 1e-7, 1e9)) == pytest.approx(found.moved_bytes / 1e9)


def test_of_other_learners_the_least_known_is_what_the_baseline_does():
    found = work("classifier", {"x": [3]}, [], {"flop": 1000, "parameters": 10}, 8)
    assert (found.least_flop, found.counted_flop, found.moved_bytes) == (1000, 1000, 280)


def test_rates_are_measured_and_precision_is_put_back(monkeypatch):
    monkeypatch.setattr(limit, "SECONDS", 1e-4)
    monkeypatch.setattr(limit, "_SQUARE", {"cpu": 64})
    monkeypatch.setattr(limit, "_COPIED_BYTES", 2**16)
    rates = measure(torch.device("cpu"))
    assert min(rates.default_flops, rates.relaxed_flops, rates.copy_bytes) > 0
    assert rates.float32_flops >= rates.default_flops
    assert torch.get_float32_matmul_precision() == "highest"
