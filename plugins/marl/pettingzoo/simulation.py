"""A copy of a PettingZoo environment with the record that restores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .cycle import steppable
from .layout import Floats, Layout

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one step of one copy."""

    next_observation: Floats
    """[N, o]."""
    reward: Floats
    """[N]."""
    terminated: bool
    truncated: bool


class Simulation:
    """Runs one episode after another and records the seed and the actions of the current one.

    Environments cannot be saved in general, but one that its seed determines, as PettingZoo
    requires, reaches the same state when the same actions are repeated.
    """

    def __init__(
        self, environment: ParallelEnv[str, Any, Any], layout: Layout
    ) -> None:
        self._environment = steppable(environment)
        self._layout = layout

    def reset(self, seed: int) -> None:
        """Starts the episode of that seed."""
        self.seed = seed
        self.actions: list[Floats] = []
        self.returned = 0.0
        observed, _ = self._environment.reset(seed=seed)
        self.observation = self._layout.observations(observed)

    def restore(self, seed: int, actions: Floats) -> None:
        """Repeats ``actions`` [T, N, a] from the start of the episode of that seed."""
        self.reset(seed)
        for action in actions:
            self.step(action)

    def has_ended_agents(self) -> bool:
        """Returns whether some agents, but not all, have ended."""
        return 0 < len(self._environment.agents) < len(self._layout.agents)

    def step(self, action: Floats) -> StepOutcome:
        """Applies actions [N, a] in [-1, 1].

        The episode ends with its last agents: truncated if one of these is, else terminated. An
        agent that ends before them, or terminates together with one that is truncated, has no
        future: it observes zeros from then on and has zero rewards.
        """
        layout = self._layout
        environment = self._environment
        live = list(environment.agents)
        observations, rewards, terminations, truncations, _ = environment.step(
            layout.actions(action, live)
        )
        # PettingZoo removes agents from its list as soon as they have ended.
        ended_agents = [
            agent for agent in live if terminations[agent] or truncations[agent]
        ]
        is_over = len(ended_agents) == len(live)
        cut_off = [
            agent
            for agent in live
            if truncations[agent] and not terminations[agent]
        ]
        truncated = is_over and bool(cut_off)
        terminated = is_over and not truncated
        unobserved = (
            set()
            if terminated
            else set(ended_agents) - set(cut_off if is_over else [])
        )
        self.observation = layout.observations(
            {k: v for k, v in observations.items() if k not in unobserved}
        )
        reward = np.array(
            [
                rewards[agent] if agent in live else 0.0
                for agent in layout.agents
            ],
            np.float32,
        )
        self.actions.append(action)
        self.returned += float(reward.mean())
        return StepOutcome(self.observation, reward, terminated, truncated)
