"""Copies of a PettingZoo parallel environment behind the interface of a batched one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.api import RunnerError, State

from ..simulator import EnvironmentStep
from .layout import Layout
from .simulation import Simulation

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

SEEDS = 2**31 - 1


class PettingZooEnvironment:
    """Steps E copies one after another and returns their transitions as tensors [E, N, ...]."""

    def __init__(
        self,
        make: Callable[[], ParallelEnv[str, Any, Any]],
        envs: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Makes the copies and starts their first episodes.

        Args:
            make: makes one copy.
            envs: number of copies E.
            device: where the tensors go.
            generator: draws a fresh seed for every episode.

        Raises:
            UsageError: the environment's spaces are of a kind that a continuous policy cannot
                work with.
        """
        environments = [make() for _ in range(envs)]
        layout = Layout(environments[0])
        self.agents = len(layout.agents)
        self.observation_size = layout.observation_size
        self.action_size = layout.action_size
        self._device = device
        self._generator = generator
        self._simulations = [
            Simulation(environment, layout) for environment in environments
        ]
        self.reset()

    def reset(self) -> Tensor:
        """Starts new episodes everywhere and returns their observations [E, N, o]."""
        self._start(self._simulations)
        return self._observation()

    def _start(self, simulations: list[Simulation]) -> None:
        seeds = torch.randint(
            SEEDS,
            (len(simulations),),
            generator=self._generator,
            device=self._device,
        )
        for simulation, seed in zip(simulations, seeds.tolist(), strict=True):
            simulation.reset(seed)

    def _observation(self) -> Tensor:
        observations = [
            simulation.observation for simulation in self._simulations
        ]
        return self._tensor(np.stack(observations))

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    def step(self, action: Tensor) -> EnvironmentStep:
        """Applies actions [E, N, a] in [-1, 1] and starts a new episode where one ended."""
        # One transfer for all copies, because every transfer waits for the device.
        actions = action.cpu().numpy().astype(np.float32)
        outcomes = []
        episodes = []
        done = []
        for simulation, row in zip(self._simulations, actions, strict=True):
            outcome = simulation.step(row)
            outcomes.append(outcome)
            if outcome.terminated or outcome.truncated:
                done.append(simulation)
                length = float(len(simulation.actions))
                episodes.append([1.0, simulation.returned, length])
            else:
                episodes.append([0.0, 0.0, 0.0])

        # The last observation of an episode, before the next episode starts.
        next_observation = self._observation()
        observation = next_observation
        if done:
            self._start(done)
            observation = self._observation()
        return EnvironmentStep(
            observation=observation,
            next_observation=next_observation,
            reward=self._tensor(
                np.stack([outcome.reward for outcome in outcomes])
            ),
            terminated=self._tensor(
                [outcome.terminated for outcome in outcomes]
            ),
            truncated=self._tensor([outcome.truncated for outcome in outcomes]),
            episodes=self._tensor(episodes),
        )

    def has_ended_agents(self) -> bool:
        """Returns whether an agent of a running episode has ended before the others."""
        return any(
            simulation.has_ended_agents() for simulation in self._simulations
        )

    def summarise(self, total: list[float]) -> dict[str, float]:
        """Metrics of finished episodes.

        Args:
            total: sum of rows of ``EnvironmentStep.episodes``, at least one episode.

        Returns:
            ``return``: mean over episodes of the mean over agents of the summed rewards (an agent
            that ended early counts with what it had). ``episode_length``: mean number of steps.
        """
        episodes, returned, length = total
        return {
            "return": returned / episodes,
            "episode_length": length / episodes,
        }

    def state_dict(self) -> State:
        """Returns seed and actions of every running episode, and their last observations."""
        shape = (-1, self.agents, self.action_size)
        actions = [
            np.array(simulation.actions, np.float32).reshape(shape)
            for simulation in self._simulations
        ]
        return {
            "seeds": [simulation.seed for simulation in self._simulations],
            "actions": [torch.from_numpy(rows) for rows in actions],
            "observation": self._observation(),
        }

    def load_state_dict(self, state: State) -> None:
        """Plays the running episodes again up to where they were.

        Raises:
            RunnerError: they came out differently, because seed and actions do not determine the
                environment.
        """
        for simulation, seed, actions in zip(
            self._simulations, state["seeds"], state["actions"], strict=True
        ):
            simulation.restore(seed, actions.cpu().numpy())
        if not torch.equal(
            self._observation(), state["observation"].to(self._device)
        ):
            raise RunnerError(
                "the environment cannot be resumed bit for bit: the same seed and the same "
                "actions led to other "
                "observations than before; start a new run"
            )
