"""PettingZoo environments as a source: real ones of mpe2, and small ones that show every rule."""

import importlib

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv
from pydantic import ValidationError

from runner.api import Context, RunnerError, Slots, UsageError
from runner.plugins.marl.pettingzoo.build import environment_maker
from runner.plugins.marl.pettingzoo.config import PettingZooConfig
from runner.plugins.marl.pettingzoo.cycle import Cycle, steppable
from runner.plugins.marl.pettingzoo.environment import PettingZooEnvironment
from runner.plugins.marl.pettingzoo.source import PettingZooSource
from runner.plugins.marl.replay.config import UniformConfig
from runner.plugins.marl.simulator_config import EvaluationConfig
from runner.plugins.marl.uav.parallel import parallel_env as uav_parallel_env

CPU = torch.device("cpu")
SPREAD = "mpe2.simple_spread_v3"


def source(environment=SPREAD, seed=0, **settings):
    defaults = {
        "envs": 3,
        "options": {"max_cycles": 7},
        "replay": UniformConfig(capacity=500),
        "evaluation": EvaluationConfig(episodes=5, seed=1),
    }
    config = PettingZooConfig(environment=environment, **{**defaults, **settings})
    context = Context(CPU, Slots(), seed)
    return PettingZooSource(config, context), context


class Still:
    """A policy that answers with the middle of every action's range."""

    def __init__(self, size):
        self.size = size

    def predict(self, observation):
        return torch.zeros(*observation.shape[:-1], self.size)


class Script(ParallelEnv):
    """Agents with given sizes that end at given steps, and remember what was asked of them."""

    metadata = {"name": "script_v0"}  # noqa: RUF012
    render_mode = None

    def __init__(self, ends, low=-2.0, high=6.0, drifting=False):
        self.ends = ends  # agent: (step, "terminated" or "truncated")
        self.possible_agents = list(ends)
        self.agents = []
        self.low, self.high = low, high
        self.asked = []
        self.drift = 0.0
        self.drifting = drifting

    def observation_space(self, agent):
        return Box(-np.inf, np.inf, (2 + self.possible_agents.index(agent),), np.float32)

    def action_space(self, agent):
        return Box(self.low, self.high, (1 + self.possible_agents.index(agent),), np.float64)

    def observe(self, agents):
        self.drift += self.drifting
        return {agent: np.full(self.observation_space(agent).shape, 1.0 + self.clock + self.drift) for agent in agents}

    def reset(self, seed=None, options=None):
        self.clock, self.agents = 0, self.possible_agents[:]
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.asked.append(actions)
        self.clock += 1
        agents = self.agents
        ended = {a for a in agents if self.ends[a][0] == self.clock}
        self.agents = [a for a in agents if a not in ended]
        return (
            self.observe(agents),
            dict.fromkeys(agents, 10.0),
            {a: a in ended and self.ends[a][1] == "terminated" for a in agents},
            {a: a in ended and self.ends[a][1] == "truncated" for a in agents},
            {a: {} for a in agents},
        )


def batched(make, envs=1, seed=0):
    return PettingZooEnvironment(make, envs, CPU, torch.Generator().manual_seed(seed))


def test_spread_is_simulated_with_the_shapes_of_its_spaces():
    spread, _ = source()
    assert spread.shapes["observation"] == (3, 18)
    assert spread.shapes["action"] == (3, 5)
    spread.collect(None)
    assert spread._replay.sample(4, 0.0)["next_observation"].shape == (4, 3, 18)


def test_transitions_are_those_of_the_environment_itself():
    """The same seed and actions by hand give the same numbers."""
    simulated = batched(environment_maker(SPREAD, {"max_cycles": 7}), envs=2, seed=5)
    seeds = simulated.state_dict()["seeds"]
    observation = simulated._observation()
    for env, seed in enumerate(seeds):
        by_hand = environment_maker(SPREAD, {"max_cycles": 7})()
        seen, _ = by_hand.reset(seed=seed)
        assert np.array_equal(np.stack(list(seen.values())), observation[env])
    action = torch.linspace(-1, 1, 30).view(2, 3, 5)
    step = simulated.step(action)
    asked = {agent: ((action[1, i] + 1) / 2).numpy() for i, agent in enumerate(by_hand.agents)}
    seen, rewards, *_ = by_hand.step(asked)
    np.testing.assert_allclose(np.stack(list(seen.values())), step.next_observation[1], rtol=1e-6)
    np.testing.assert_allclose(list(rewards.values()), step.reward[1], rtol=1e-6)


def test_a_limit_truncates_with_the_true_last_observation_and_a_new_episode():
    simulated = batched(environment_maker(SPREAD, {"max_cycles": 4}), envs=2)
    seeds = simulated.state_dict()["seeds"]
    action = torch.zeros(2, 3, 5)
    for _ in range(3):
        assert not simulated.step(action).truncated.any()
    step = simulated.step(action)
    assert step.truncated.all()
    assert not step.terminated.any()
    assert step.episodes[:, 0].tolist() == [1, 1]
    assert step.episodes[:, 2].tolist() == [4, 4]
    assert not torch.equal(step.observation, step.next_observation)
    assert simulated.state_dict()["seeds"] != seeds
    assert len({*seeds, *simulated.state_dict()["seeds"]}) == 4


def test_agents_of_different_sizes_are_padded_and_actions_scaled_to_their_bounds():
    made = []

    def make():
        made.append(Script({"a": (9, "truncated"), "b": (9, "truncated")}))
        return made[-1]

    simulated = batched(make)
    assert (simulated.observation_size, simulated.action_size) == (3, 2)
    step = simulated.step(torch.tensor([[[-1.0, 0.0], [0.5, 4.0]]]))
    assert step.next_observation.tolist() == [[[2.0, 2.0, 0.0], [2.0, 2.0, 2.0]]]
    assert {agent: value.tolist() for agent, value in made[0].asked[0].items()} == {"a": [-2.0], "b": [4.0, 6.0]}


def test_an_agent_that_dies_early_is_silent_until_the_others_end():
    made = []

    def make():
        made.append(Script({"a": (1, "terminated"), "b": (3, "terminated")}))
        return made[-1]

    simulated = batched(make)
    action = torch.zeros(1, 2, 2)
    first, second, third = (simulated.step(action) for _ in range(3))
    assert first.next_observation[0].tolist() == [[0, 0, 0], [2, 2, 2]]
    assert first.reward.tolist() == [[10, 10]]
    assert not first.terminated
    assert second.next_observation[0].tolist() == [[0, 0, 0], [3, 3, 3]]
    assert second.reward.tolist() == [[0, 10]]
    assert set(made[0].asked[1]) == {"b"}
    assert third.terminated
    assert third.next_observation[0].tolist() == [[0, 0, 0], [4, 4, 4]]
    assert third.episodes.tolist() == [[1, 20, 3]]
    assert third.observation[0].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("ends", "terminated", "last"),
    [
        ({"a": (1, "terminated"), "b": (1, "terminated")}, True, [[2, 2, 0], [2, 2, 2]]),
        ({"a": (1, "truncated"), "b": (1, "truncated")}, False, [[2, 2, 0], [2, 2, 2]]),
        ({"a": (1, "terminated"), "b": (1, "truncated")}, False, [[0, 0, 0], [2, 2, 2]]),
    ],
)
def test_an_episode_is_terminated_only_if_none_of_its_last_agents_is_cut_off(ends, terminated, last):
    step = batched(lambda: Script(ends)).step(torch.zeros(1, 2, 2))
    assert bool(step.terminated) is terminated
    assert bool(step.truncated) is not terminated
    assert step.next_observation[0].tolist() == last


def test_evaluation_and_training_repeat_with_the_seed():
    spread, _ = source()
    spread.collect(None)
    metrics = spread.evaluate(Still(5))
    assert metrics == source(seed=4)[0].evaluate(Still(5))
    assert metrics["episode_length"] == 7
    assert metrics["return"] < 0
    batches = []
    for _ in range(2):
        again, _ = source(seed=6)
        for _ in range(20):
            again.collect(None)
        batches.append(again._replay.sample(50, 0.0))
        assert again.statistics()["episodes"] == 6
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


def test_a_restored_source_continues_bit_for_bit_in_the_middle_of_an_episode():
    spread, context = source()
    for _ in range(10):
        spread.collect(None)
    state = spread.state_dict()  # a ring finds its rows by number, also when others have been added
    numbers = {name: generator.get_state() for name, generator in context.generators.items()}
    other, other_context = source(seed=1)
    other.collect(None)
    other.load_state_dict(state)
    for name, value in numbers.items():
        other_context.generators[name].set_state(value)
    batches = []
    for continued in (spread, other):
        for _ in range(10):
            continued.collect(None)
        batches.append(continued._replay.sample(50, 0.0))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert spread.statistics() == other.statistics()


def test_an_environment_that_its_seed_does_not_determine_is_not_resumed_in_silence():
    simulated = batched(lambda: Script({"a": (9, "truncated")}, drifting=True))
    simulated.step(torch.zeros(1, 1, 1))
    with pytest.raises(RunnerError, match="bit for bit"):
        simulated.load_state_dict(simulated.state_dict())


def test_our_own_parallel_environment_goes_the_whole_way_round():
    simulated = batched(lambda: uav_parallel_env(followers=2, episode_limit=5), envs=2)
    for _ in range(5):
        step = simulated.step(torch.zeros(2, 3, 2))
    assert step.truncated.all()
    assert step.next_observation.shape == (2, 3, 7)


@pytest.mark.parametrize(
    "name",
    ["os", "os.path", "mpe2", "mpe2.simple_spread", "mpe2._mpe_utils.x_v1", "pettingzoo.test.api_test_v1",
     "evil.mpe2.simple_spread_v3", "mpe2.simple_spread_v3\n", "mpe2..simple_v3", "pettingzoo.sisl/x_v1"],
)  # fmt: skip
def test_a_recipe_cannot_import_what_it_likes(name):
    with pytest.raises(ValidationError, match="not an environment that a recipe may name"):
        PettingZooConfig(environment=name)


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("mpe2.simple_spred_v3", {}, "has no environment 'mpe2.simple_spred_v3'"),
        (SPREAD, {"colour": "red"}, "data.options: 'mpe2.simple_spread_v3' refuses .*colour"),
        (SPREAD, {"continuous_actions": False}, "actions of agent_0 are Discrete.*data.options"),
    ],
)
def test_what_cannot_work_is_one_clear_message(environment, options, message):
    with pytest.raises(UsageError, match=message):
        source(environment, options=options)


def test_unbounded_actions_are_refused():
    with pytest.raises(UsageError, match="bounded continuous box"):
        batched(lambda: Script({"a": (1, "truncated")}, high=np.inf))


def test_observations_that_are_no_box_are_refused(monkeypatch):
    monkeypatch.setattr(Script, "observation_space", lambda self, agent: Discrete(4))
    with pytest.raises(UsageError, match="not a box"):
        batched(lambda: Script({"a": (1, "truncated")}))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("mpe2", r"pip install 'proven-runner\[pettingzoo\]'"), ("Box2D", "leave to you to install")],
)
def test_a_missing_package_says_how_to_get_it(monkeypatch, missing, message):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr("importlib.import_module", import_module)
    with pytest.raises(UsageError, match=message):
        environment_maker(SPREAD, {})


def test_every_setting_is_read():
    spread, _ = source()
    assert [path for path in spread.config.unread() if not path.startswith("replay.")] == []


@pytest.mark.parametrize("options", [{}, {"N": 2, "local_ratio": 0.2}, {"terminate_on_success": True}])
@pytest.mark.parametrize("name", ["simple_spread_v3", "simple_tag_v3", "simple_speaker_listener_v4"])
def test_agents_that_take_turns_are_stepped_as_pettingzoo_converts_them(name, options):
    """Bit for bit, to the end of the episode, whatever the number of turns in a step."""
    arguments = {"max_cycles": 9, "continuous_actions": True, **(options if "spread" in name else {})}
    converted = importlib.import_module(f"mpe2.{name}").parallel_env(**arguments)
    cycle = steppable(importlib.import_module(f"mpe2.{name}").parallel_env(**arguments))
    assert isinstance(cycle, Cycle)
    for seed in range(3):
        seen, _ = converted.reset(seed=seed)
        same, _ = cycle.reset(seed=seed)
        while converted.agents:
            assert cycle.agents == converted.agents
            assert all(np.array_equal(same[agent], seen[agent]) for agent in seen)
            actions = {agent: converted.action_space(agent).sample() for agent in converted.agents}
            seen, *numbers, _ = converted.step(actions)
            same, *others, _ = cycle.step(actions)
            assert [dict(column) for column in others] == [dict(column) for column in numbers]
        assert not cycle.agents


def test_an_environment_that_is_not_converted_is_stepped_as_it_is():
    script = Script({"a": (3, "truncated")})
    assert steppable(script) is script
