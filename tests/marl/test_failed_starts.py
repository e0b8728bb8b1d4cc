"""Episodes that begin like ones that failed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.marl.uav.config import UavConfig
from runner.plugins.marl.uav.environment import UavEnvironment
from runner.plugins.marl.uav.failed_starts import CAPACITY, FailedStarts

CPU = torch.device("cpu")
ENVS = 8


def starts(number, agents=3):
    """Starts that can be told apart by their first number."""
    return torch.arange(number * ENVS, (number + 1) * ENVS).view(-1, 1, 1) + torch.zeros(ENVS, agents, 4)


def make(share, seed=0):
    return FailedStarts(share, starts(0), torch.Generator().manual_seed(seed))


@given(
    share=st.sampled_from([0.0, 0.25, 1.0]),
    outcomes=st.lists(st.lists(st.integers(0, 2), min_size=ENVS, max_size=ENVS), max_size=30),
)
def test_only_starts_that_failed_lately_are_repeated(share, outcomes):
    memory, running, failures = make(share), starts(0), []
    for number, outcome in enumerate(outcomes, 1):
        # An episode continues (0), succeeds (1) or fails (2).
        ended = torch.tensor(outcome) > 0
        failed = torch.tensor(outcome) == 2
        fresh = starts(number)
        start = memory.replace(fresh)
        repeated = (start != fresh).all((1, 2))
        recent = failures[-CAPACITY:]
        assert all(float(row[0, 0]) in recent for row in start[repeated])
        assert share > 0 or not repeated.any()
        assert share < 1 or not recent or repeated.all()
        failures += running[failed, 0, 0].tolist()
        memory.end(ended, failed, start)
        running = torch.where(ended.view(-1, 1, 1), start, running)


def test_the_share_of_repeated_starts_is_the_configured_one():
    memory = make(0.2)
    memory.end(torch.ones(ENVS, dtype=torch.bool), torch.ones(ENVS, dtype=torch.bool), starts(1))
    repeated = [(memory.replace(starts(9)) < ENVS).all((1, 2)).sum() for _ in range(1000)]
    assert 0.18 < float(torch.stack(repeated).sum()) / (1000 * ENVS) < 0.22


def flying(share, seed=3):
    config = UavConfig(followers=2, episode_limit=12)
    environment = UavEnvironment(config, ENVS, CPU, torch.Generator().manual_seed(seed))
    if share:
        environment.repeat_failures(share)
    return environment


def fly(environment, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    return [environment.step(torch.rand(ENVS, 3, 2, generator=generator) * 2 - 1) for _ in range(steps)]


def test_flights_repeat_failed_starts_and_none_without_the_setting():
    # Flights of 12 steps end by truncation, which counts as a failure. The second flights begin
    # while the first ones are being stored, the third may repeat the first.
    repeating, plain = flying(1.0), flying(0.0)
    first = repeating._bodies.clone()
    assert torch.equal(first, plain._bodies)
    fly(repeating, 24, 0)
    fly(plain, 24, 0)
    assert any((bodies == first).all((1, 2)).any() for bodies in repeating._bodies)
    assert not any((bodies == first).all((1, 2)).any() for bodies in plain._bodies)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_flights_continue_from_a_state_bit_for_bit(share):
    environment, resumed = flying(share), flying(share, seed=4)
    fly(environment, 29, 0)
    resumed.load_state_dict(environment.state_dict())
    resumed._generator.set_state(environment._generator.get_state())
    for left, right in zip(fly(environment, 40, 1), fly(resumed, 40, 1), strict=True):
        assert torch.equal(left.observation, right.observation)
        assert torch.equal(left.episodes, right.episodes)
