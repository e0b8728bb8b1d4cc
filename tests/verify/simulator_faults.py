"""A simulator in PettingZoo's form, and a stage that is wrong about simulators with a replay buffer."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box
from pettingzoo import ParallelEnv

from runner.api import Close, Exact, Objective, Stage, StageConfig
from runner.plugins.marl.pettingzoo.source import PettingZooSource
from runner.plugins.marl.simulator import SimulatorSource
from runner.plugins.marl.simulator_config import SimulatorConfig


class Runners(ParallelEnv):
    """Runners leave at the finish; the race is cut off after some steps."""

    metadata = {"name": "runners_v0"}  # noqa: RUF012
    render_mode = None

    def __init__(self, limit):
        self.limit = limit
        self.possible_agents = ["first", "second", "third"]
        self.agents = []

    def observation_space(self, agent):
        return Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent):
        return Box(-1.0, 1.0, (1,), np.float32)

    def observe(self, agents):
        return {agent: np.array([self.places[agent], self.clock / 10], np.float32) for agent in agents}

    def reset(self, seed=None, options=None):
        generator = np.random.default_rng(seed)
        start = generator.uniform(0, 0.5, len(self.possible_agents))
        self.places = dict(zip(self.possible_agents, start, strict=True))
        self.pace = generator.choice((0.2, 0.9))
        self.clock, self.agents = 0, self.possible_agents[:]
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.clock += 1
        agents = self.agents
        for agent, action in actions.items():
            self.places[agent] += self.pace * (1 + 0.2 * float(action[0]))
        finished = {agent: self.places[agent] > 1.5 for agent in agents}
        late = {agent: self.clock == self.limit and not finished[agent] for agent in agents}
        self.agents = [agent for agent in agents if not finished[agent] and not late[agent]]
        rewards = {agent: float(finished[agent]) - 0.1 for agent in agents}
        return self.observe(agents), rewards, finished, late, {agent: {} for agent in agents}


class RunnersConfig(SimulatorConfig):
    """Races of three runners."""

    kind: ClassVar[str] = "runners"
    implementation = "RunnersSource"
    objective: ClassVar[Objective | None] = Objective("return", "maximize")
    limit: int = 6


class RunnersSource(PettingZooSource):
    def __init__(self, config, context):
        self._make = lambda: Runners(config.limit)
        SimulatorSource.__init__(self, config, context)


class FaultyConfig(StageConfig):
    """Changes the source."""

    kind: ClassVar[str] = "faulty"
    implementation = "Faulty"
    phase: ClassVar[int] = 1
    fault: str = "none"
    promise: str = "exact"

    def contract(self, setting):
        return Exact() if self.promise == "exact" else Close()


class Faulty(Stage):
    """Makes the fault of its settings."""

    def attach(self, pipeline):
        self.source = pipeline.source
        self.environment = self.source._environment
        self.usual_shape = self.source._observation.shape[:1]
        replay = self.source._replay
        self.wrap(self.environment, "step", self.step)
        self.wrap(self.source, "rollout", self.rollout)
        self.wrap(replay, "_places", self.places)
        self.capacity = replay.capacity
        if self.config.fault == "same episode" and hasattr(self.environment, "_simulations"):
            for simulation in self.environment._simulations:
                self.wrap(simulation, "reset", lambda reset, seed, simulation=simulation: reset(simulation.seed))

    def wrap(self, owner, name, changed):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *inputs: changed(inner, *inputs))

    def step(self, inner, action):
        fault = self.config.fault
        if fault == "last copy" and len(action) != 4:
            action[-1] = 0
        step = inner(action)
        if fault == "stale observation":
            return replace(step, observation=step.next_observation)
        if fault == "new observation":
            return replace(step, next_observation=step.observation)
        if fault == "timeout ends":
            return replace(step, terminated=step.terminated | step.truncated)
        if fault == "success continues":
            return replace(step, terminated=step.terminated & (step.episodes[:, 1] == 0))
        if fault == "collision continues":
            return replace(step, terminated=step.terminated & (step.episodes[:, 2] == 0))
        if fault == "ended agents earn":
            return replace(step, reward=torch.where(step.reward == 0, -0.1, step.reward))
        return step

    def rollout(self, inner, *inputs):
        fault = self.config.fault
        for step, running in inner(*inputs):
            if fault == "evaluated collisions lost":
                running = running & (step.episodes[:, 2] == 0)
            yield step, running | (fault == "episodes count twice")

    def places(self, inner, first, last):
        if self.config.fault == "seam":
            return (torch.arange(first, last) - first + first % self.capacity).clamp(max=self.capacity - 1)
        return inner(first, last)
