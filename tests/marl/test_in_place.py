"""Environments and policies that use their memory again: what is stored is what was the case then."""

from typing import ClassVar

import pytest
import torch

from runner.api import Context, Objective, Slots
from runner.plugins.marl.replay.config import PrioritizedConfig, UniformConfig
from runner.plugins.marl.simulator import EnvironmentStep, SimulatorSource
from runner.plugins.marl.simulator_config import EvaluationConfig, SimulatorConfig

CPU = torch.device("cpu")
ENVS, LIMIT = 3, 4


class Counter:
    """Counts its steps up to a limit in tensors that it owns, and scales actions where they are."""

    agents, observation_size, action_size = 2, 1, 1

    def __init__(self, envs, reused):
        self.reused = reused
        self.count = torch.zeros(envs, 2, 1)
        self.after, self.reward = torch.zeros(envs, 2, 1), torch.zeros(envs, 2)
        self.over = torch.zeros(envs, dtype=torch.bool)
        self.episodes = torch.zeros(envs, 2)

    def out(self, name):
        tensor = getattr(self, name)
        return tensor if name in self.reused else tensor.clone()

    def reset(self):
        self.count.zero_()
        return self.out("count")

    def step(self, action):
        action.mul_(100)
        self.count += 1
        self.after.copy_(self.count)
        self.reward.copy_(self.count[..., 0])
        self.over.copy_(self.count[:, 0, 0] == LIMIT)
        self.episodes.copy_(torch.stack([torch.ones(len(self.over)), self.reward[:, 0]], 1) * self.over[:, None])
        self.count[self.over] = 0
        never = torch.zeros_like(self.over)
        return EnvironmentStep(
            self.out("count"), self.out("after"), self.out("reward"), self.out("over"), never, self.out("episodes")
        )

    def summarise(self, total):
        return {"return": total[1] / total[0]}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count.copy_(state["count"])


class CounterConfig(SimulatorConfig):
    """Counts."""

    kind: ClassVar[str] = "counter"
    implementation = "CounterSource"
    objective: ClassVar[Objective | None] = Objective("return", "maximize")


class CounterSource(SimulatorSource):
    reused = ("count", "after", "reward", "over", "episodes")

    def make_environment(self, config, envs, device, generator):
        return Counter(envs, self.reused)


class Policy:
    """Answers with a tenth of what it observes, in memory that it uses again, and normalises that in place."""

    def __init__(self):
        self.answer = torch.zeros(ENVS, 2, 1)

    def __call__(self, observation):
        self.answer.copy_(observation / 10)
        observation.sub_(1000)
        return self.answer

    predict = __call__


def collected(replay, reused, steps):
    source = type("Source", (CounterSource,), {"reused": reused})
    config = CounterConfig(envs=ENVS, replay=replay, evaluation=EvaluationConfig(episodes=ENVS, seed=0))
    made = source(config, Context(CPU, Slots(), 0, batch_size=8))
    policy = Policy()
    for _ in range(steps):
        made.collect(policy)
    return made


@pytest.mark.parametrize("replay", [UniformConfig(capacity=100), PrioritizedConfig(capacity=100)])
@pytest.mark.parametrize("reused", [(), ("count",), ("after", "reward"), CounterSource.reused])
def test_stored_transitions_are_what_was_observed_done_and_earned(reused, replay):
    source = collected(replay, reused, 25)
    batch = source._replay.sample(400, 0.0)
    before, after = batch["observation"], batch["next_observation"]
    assert set(before.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert torch.equal(after, before + 1)
    assert torch.equal(batch["reward"], after[..., 0])
    assert torch.equal(batch["terminated"], (after[:, 0, 0] == LIMIT).float())
    assert torch.allclose(batch["action"], before / 10)
    assert source.statistics() == {"episodes": 18.0, "return": 4.0}  # six episodes of every environment


def test_evaluation_and_resuming_are_right_in_memory_that_is_used_again():
    source = collected(UniformConfig(capacity=100), CounterSource.reused, 6)
    assert source.evaluate(Policy()) == {"return": 4.0}
    state = source.state_dict()
    other = collected(UniformConfig(capacity=100), CounterSource.reused, 0)
    other.load_state_dict(state)
    acted = Policy()
    other.collect(acted)  # from the state of the sixth step, which the first source still has
    assert torch.equal(source._observation, torch.full((ENVS, 2, 1), 2.0))
    assert torch.equal(acted.answer, torch.full((ENVS, 2, 1), 0.2))
