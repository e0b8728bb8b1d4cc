"""The UAV environment as a PettingZoo parallel environment."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from .config import (
    OBSERVATION_SIZE,
    ObstaclesConfig,
    RewardConfig,
    UavConfig,
)
from .environment import UavEnvironment

Floats = NDArray[np.float32]
FASTEST = 4 / 3
"""Largest number in an observation: a top speed of 40, a follower's or an obstacle's, divided by
30.
"""


class UavParallelEnv(ParallelEnv[str, Floats, Floats]):  # type: ignore[misc]
    """A simulation of ``leader`` and ``follower_0`` to ``follower_<n-1>``, who all end together.

    The last infos of an episode hold its metrics under the names that evaluation uses.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "uav_path_planning_v0",
        "render_modes": [],
        "is_parallelizable": True,
    }
    render_mode = None

    def __init__(self, config: UavConfig) -> None:
        self.possible_agents = [
            "leader",
            *(f"follower_{index}" for index in range(config.followers)),
        ]
        self.agents: list[str] = []
        high = np.full(config.observation_size, FASTEST, np.float32)
        low = np.zeros_like(high)
        # Relative positions and velocities of obstacles may be negative.
        low[OBSERVATION_SIZE:] = -FASTEST
        self._observation_spaces = {
            agent: Box(low, high) for agent in self.possible_agents
        }
        self._action_spaces = {
            agent: Box(-1.0, 1.0, (2,), np.float32)
            for agent in self.possible_agents
        }
        self._generator = torch.Generator()
        # Without a seed for ``reset``, PettingZoo expects episodes that cannot be predicted.
        self._generator.seed()
        self._environment = UavEnvironment(
            config, 1, torch.device("cpu"), self._generator
        )

    def observation_space(self, agent: str) -> Space[Floats]:
        """Returns the box of that agent's observations [o]."""
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> Space[Floats]:
        """Returns the box of that agent's actions [2]: acceleration and turn in [-1, 1]."""
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, dict[str, Any]]]:
        """Starts an episode; without a seed, the next one of the present random sequence.
        ``options`` is ignored.
        """
        if seed is not None:
            self._generator.manual_seed(seed)
        self.agents = self.possible_agents[:]
        return self._by_agent(self._environment.reset()), {
            agent: {} for agent in self.agents
        }

    def step(
        self, actions: dict[str, Floats]
    ) -> tuple[
        dict[str, Floats],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Applies the actions of all agents; see PettingZoo's ``ParallelEnv.step``."""
        agents = self.agents
        if not agents:
            return {}, {}, {}, {}, {}
        action = torch.from_numpy(
            np.stack([actions[agent] for agent in agents])
        ).unsqueeze(0)
        step = self._environment.step(action)
        terminated = bool(step.terminated)
        truncated = bool(step.truncated)
        metrics: dict[str, float] = {}
        if terminated or truncated:
            metrics = self._environment.summarise(step.episodes[0].tolist())
            self.agents = []
        return (
            self._by_agent(step.next_observation),
            dict(zip(agents, step.reward[0].tolist(), strict=True)),
            dict.fromkeys(agents, terminated),
            dict.fromkeys(agents, truncated),
            {agent: dict(metrics) for agent in agents},
        )

    def _by_agent(self, observation: torch.Tensor) -> dict[str, Floats]:
        return dict(
            zip(self.possible_agents, observation[0].numpy(), strict=True)
        )


def parallel_env(
    followers: int = 3,
    episode_limit: int = 1000,
    reward: dict[str, Any] | None = None,
    legacy_timing: bool = False,
    obstacles: dict[str, Any] | None = None,
) -> UavParallelEnv:
    """Makes the environment; the arguments are the settings of ``data.kind: uav_path_planning``."""
    return UavParallelEnv(
        UavConfig(
            followers=followers,
            episode_limit=episode_limit,
            reward=RewardConfig(**(reward or {})),
            legacy_timing=legacy_timing,
            obstacles=ObstaclesConfig(**(obstacles or {})),
        )
    )
