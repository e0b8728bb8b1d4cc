"""A simulator of one's own: agents on a line walk to a goal, all simulations in one batch of tensors."""

import torch

from runner.api import Objective
from runner.plugins.marl.simulator import EnvironmentStep, SimulatorSource
from runner.plugins.marl.simulator_config import SimulatorConfig


class LineConfig(SimulatorConfig):
    """Agents walk along a line to a goal that all of them see."""

    kind = "my_line"
    implementation = "Line"
    headline = ("return", "distance")
    objective = Objective("return", "maximize")
    agents: int = 2
    """How many walk."""
    limit: int = 25
    """Steps of an episode."""


class Line(SimulatorSource):
    def make_environment(self, config, envs, device, generator):
        return Walks(config, envs, device, generator)


class Walks:
    observation_size, action_size = 2, 1

    def __init__(self, config, envs, device, generator):
        self.agents, self.limit = config.agents, config.limit
        self.shape = (envs, config.agents)
        self.device, self.generator = device, generator

    def starts(self, shape):
        return torch.rand(shape, generator=self.generator, device=self.device) * 2 - 1

    def reset(self):
        self.place, self.goal = self.starts(self.shape), self.starts(self.shape[:1])
        self.steps = torch.zeros(self.shape[0], dtype=torch.long, device=self.device)
        self.earned = torch.zeros(self.shape[0], device=self.device)
        return self.observation()

    def observation(self):
        return torch.stack([self.place, self.goal[:, None].expand(self.shape)], dim=-1)

    def step(self, action):
        self.place = (self.place + 0.1 * action[..., 0]).clamp(-1, 1)
        distance = (self.place - self.goal[:, None]).abs()
        self.steps, self.earned = self.steps + 1, self.earned - distance.mean(1)
        next_observation, over = self.observation(), self.steps == self.limit
        episodes = torch.stack([torch.ones_like(self.earned), self.earned, distance.mean(1)], dim=1) * over[:, None]
        self.place = torch.where(over[:, None], self.starts(self.shape), self.place)  # begins anew within the step
        self.goal = torch.where(over, self.starts(self.shape[:1]), self.goal)
        self.steps, self.earned = self.steps * ~over, self.earned * ~over
        never = torch.zeros_like(over)
        return EnvironmentStep(self.observation(), next_observation, -distance, never, over, episodes)

    def summarise(self, total):
        count, earned, distance = total
        return {"return": earned / count, "distance": distance / count}

    def state_dict(self):
        return {"place": self.place, "goal": self.goal, "steps": self.steps, "earned": self.earned}

    def load_state_dict(self, state):
        for name, tensor in state.items():
            setattr(self, name, tensor.to(self.device))
