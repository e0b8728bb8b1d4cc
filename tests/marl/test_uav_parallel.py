"""The UAV environment as others see it: a PettingZoo parallel environment."""

import warnings

import numpy as np
import pytest
from pydantic import ValidationError

from runner.plugins.marl.uav.parallel import parallel_env

with warnings.catch_warnings():
    # PettingZoo's tests import its examples in a way that it deprecates itself
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import parallel_api_test, parallel_seed_test


OBSTACLES = {"count": 4, "speed": 40, "turn": 0.2}


@pytest.mark.parametrize(("followers", "obstacles"), [(1, None), (4, None), (2, OBSTACLES)])
def test_it_passes_the_test_of_pettingzoo(followers, obstacles):
    environment = parallel_env(followers=followers, obstacles=obstacles, episode_limit=60)
    parallel_api_test(environment, num_cycles=200)


def test_its_seed_decides_everything():
    parallel_seed_test(lambda: parallel_env(episode_limit=20), num_cycles=50)


@pytest.mark.parametrize(("obstacles", "size"), [(None, 7), ({"speed": 40}, 11), (OBSTACLES, 19)])
def test_observations_stay_within_their_space_and_the_last_infos_hold_the_metrics(obstacles, size):
    environment = parallel_env(followers=2, episode_limit=60, obstacles=obstacles)
    assert environment.observation_space("leader").shape == (size,)
    observations, infos = environment.reset(seed=1)
    assert list(observations) == list(infos) == ["leader", "follower_0", "follower_1"]
    spaces = {agent: environment.action_space(agent) for agent in environment.agents}
    for index, space in enumerate(spaces.values()):
        space.seed(index)
    while environment.agents:
        assert not any(infos.values())
        for agent, observation in observations.items():
            assert environment.observation_space(agent).contains(observation)
        actions = {agent: space.sample() for agent, space in spaces.items()}
        observations, rewards, terminations, truncations, infos = environment.step(actions)
    assert set(rewards) == set(terminations) == set(truncations) == set(spaces)
    metrics = infos["leader"]
    assert metrics["success_rate"] + metrics["collision_rate"] + metrics["timeout_rate"] == 1
    assert environment.step({}) == ({}, {}, {}, {}, {})


def test_top_speed_is_within_the_observation_space():
    environment = parallel_env(followers=1)
    environment.reset(seed=0)
    full_speed = np.array([1.0, 0.0], np.float32)
    for _ in range(60):
        observations, *_ = environment.step(dict.fromkeys(environment.agents, full_speed))
        if not environment.agents:
            break
        assert environment.observation_space("follower_0").contains(observations["follower_0"])
    assert observations["follower_0"][2] == pytest.approx(4 / 3)


def test_settings_are_those_of_the_recipe():
    with pytest.raises(ValidationError, match="preset"):
        parallel_env(reward={"preset": "v9"})
