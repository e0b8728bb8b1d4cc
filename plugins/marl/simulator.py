"""A source that simulates: a batch of environments, a replay buffer, and evaluation on held-out seeds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.api import Batch, Context, Learner, Source, State, UsageError

from .replay.build import make_replay, storage_device
from .simulator_config import SimulatorConfig

STEPS_BETWEEN_CHECKS = 10
"""Evaluation asks an accelerator only this often whether all episodes are over, because every question waits for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of E environments with N agents gives; a finished environment is reset within the step."""

    observation: Tensor
    """[E, N, o]: what to act on next; of the new episode where the old one ended."""
    next_observation: Tensor
    """[E, N, o]: what the action led to, also where the episode ended."""
    reward: Tensor
    """[E, N]."""
    terminated: Tensor
    """[E], bool: the task ended; nothing follows, so nothing may be bootstrapped."""
    truncated: Tensor
    """[E], bool: the episode was cut off; its value goes on."""
    episodes: Tensor
    """[E, 1 + m]: 1 and m numbers that can be added up for each episode that ended in this step, else zeros."""


class BatchedEnvironment(Protocol):
    """E copies of an environment with N agents that are stepped as one."""

    agents: int
    observation_size: int
    action_size: int

    def reset(self) -> Tensor:
        """Starts new episodes everywhere and returns their observations [E, N, o]."""

    def step(self, action: Tensor) -> Step:
        """Applies actions [E, N, a] in [-1, 1]."""

    def summarise(self, total: list[float]) -> dict[str, float]:
        """Metrics by name of the episodes whose rows of ``Step.episodes`` add up to ``total``; at least one."""

    def state_dict(self) -> State:
        """All that ``load_state_dict`` needs to continue in the middle of an episode."""

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""


class SimulatorSource(Source):
    """Collects transitions from a batched environment into a replay buffer.

    Batches hold ``observation`` [B, N, o], ``action`` [B, N, a], ``reward`` [B, N], ``next_observation`` [B, N, o] and
    ``terminated`` [B] (0 or 1), and what the replay adds: ``weight`` [B] and ``index`` [B].
    Random numbers come from the context's generators ``environment``, ``exploration`` (actions of the warm-up) and
    ``replay``; their states are the context's, all others are in ``state_dict``.
    """

    def __init__(self, config: SimulatorConfig, context: Context) -> None:
        self.config = config
        self._device = context.device
        self._evaluation_episodes, self._evaluation_seed = config.evaluation.episodes, config.evaluation.seed
        self._exploration = context.generator("exploration")
        self._envs = config.envs
        self._environment = self.make_environment(config, self._envs, self._device, context.generator("environment"))
        self._observation = self._environment.reset()
        agents, size = self._environment.agents, self._environment.observation_size
        self._action_shape = (agents, self._environment.action_size)
        stored = {
            "observation": (agents, size),
            "action": self._action_shape,
            "reward": (agents,),
            "next_observation": (agents, size),
            "terminated": (),
        }
        self.shapes = {**stored, "weight": (), "index": ()}
        storage = storage_device(config.replay, self._device)
        generator = context.generator("replay", storage)
        self._replay = make_replay(config.replay, stored, self._device, generator)
        self._finished: Tensor | None = None

    @abstractmethod
    def make_environment(
        self, config: Any, envs: int, device: torch.device, generator: torch.Generator
    ) -> BatchedEnvironment:
        """Builds ``envs`` simulations that draw their episodes from ``generator``."""

    @torch.no_grad()
    def collect(self, act: Callable[[Tensor], Tensor] | None) -> int:
        """Steps all environments once and stores the transitions; see ``Source.collect``."""
        action = self._random_action() if act is None else act(self._observation)
        step = self._environment.step(action)
        self._replay.add(
            {
                "observation": self._observation,
                "action": action,
                "reward": step.reward,
                "next_observation": step.next_observation,
                "terminated": step.terminated.to(step.reward.dtype),
            }
        )
        self._observation = step.observation
        finished = step.episodes.sum(0, dtype=torch.float64)
        self._finished = finished if self._finished is None else self._finished + finished
        return self._envs

    def _random_action(self) -> Tensor:
        shape = (self._envs, *self._action_shape)
        return torch.rand(shape, generator=self._exploration, device=self._device) * 2 - 1

    def ready(self, batch_size: int) -> bool:
        """Whether the replay buffer holds a batch of that size."""
        return len(self._replay) >= batch_size

    def sample(self, batch_size: int, progress: float) -> Batch:
        """Draws a batch from the replay buffer."""
        return self._replay.sample(batch_size, progress)

    def feedback(self, batch: Batch, output: Batch) -> None:
        """Hands the TD errors of the batch, ``output["td_error"]`` [B], to a prioritized replay buffer.

        Raises:
            UsageError: the replay is prioritized and the learner returns no TD errors.
        """
        if self.config.replay.kind != "prioritized":
            return
        if "td_error" not in output:
            raise UsageError("data.replay.kind: prioritized replay needs a learner whose update returns 'td_error'")
        self._replay.update_priorities(batch["index"], output["td_error"])

    @torch.no_grad()
    def evaluate(self, learner: Learner) -> dict[str, float]:
        """Runs the deterministic policy through the held-out episodes, the same ones every time.

        Every episode has a simulation of its own and counts once; training's environments and generators are not
        touched.
        """
        generator = torch.Generator(self._device).manual_seed(self._evaluation_seed)
        environment = self.make_environment(self.config, self._evaluation_episodes, self._device, generator)
        observation = environment.reset()
        running = torch.ones(self._evaluation_episodes, dtype=torch.bool, device=self._device)
        total: Tensor | None = None
        for steps in count(1):
            step = environment.step(learner.predict(observation))
            finished = (step.episodes * running.unsqueeze(-1)).sum(0, dtype=torch.float64)
            total = finished if total is None else total + finished
            running &= ~(step.terminated | step.truncated)
            observation = step.observation
            if (self._device.type == "cpu" or steps % STEPS_BETWEEN_CHECKS == 0) and not running.any():
                return environment.summarise(total.tolist())
        raise AssertionError("count() has no end")

    def statistics(self) -> dict[str, float]:
        """Metrics of the training episodes that ended since the last call, and ``episodes``, how many they are."""
        total = [0.0] if self._finished is None else self._finished.tolist()
        self._finished = None
        if total[0] == 0:
            return {"episodes": 0.0}
        return {"episodes": total[0], **self._environment.summarise(total)}

    def state_dict(self) -> State:
        """Environments, observations to act on, episodes not yet reported, replay buffer."""
        return {
            "environment": self._environment.state_dict(),
            "observation": self._observation,
            "finished": self._finished,
            "replay": self._replay.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""
        self._environment.load_state_dict(state["environment"])
        self._observation = state["observation"].to(self._device)
        self._finished = None if state["finished"] is None else state["finished"].to(self._device)
        self._replay.load_state_dict(state["replay"])
