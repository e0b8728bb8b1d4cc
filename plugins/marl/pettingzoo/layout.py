"""Maps the agents of a PettingZoo environment to tensors of one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runner.api import UsageError

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

Floats = NDArray[np.float32]


class Layout:
    """Sizes and bounds of N agents: observations [N, o] and actions [N, a], padded with zeros to
    the largest.

    Raises:
        UsageError: An agent's observations are not a box, or its actions are not a
            bounded box of floating-point numbers.
    """

    def __init__(self, environment: ParallelEnv[str, Any, Any]) -> None:
        from gymnasium.spaces import Box

        self.agents: tuple[str, ...] = tuple(environment.possible_agents)
        action_spaces = {
            agent: environment.action_space(agent) for agent in self.agents
        }
        observation_spaces = {
            agent: environment.observation_space(agent) for agent in self.agents
        }
        for agent in self.agents:
            if not isinstance(observation_spaces[agent], Box):
                raise UsageError(
                    f"data.environment: {agent} observes {observation_spaces[agent]}, which is "
                    f"not a box"
                )
            space = action_spaces[agent]
            is_box = isinstance(space, Box) and np.issubdtype(
                space.dtype, np.floating
            )
            if not is_box or not space.is_bounded():
                raise UsageError(
                    f"data.environment: the actions of {agent} are {space}, but they must be a "
                    f"bounded continuous box; "
                    "many environments have an option for that (see data.options)"
                )
        self.observation_size = max(
            int(np.prod(space.shape)) for space in observation_spaces.values()
        )
        sizes = [int(np.prod(space.shape)) for space in action_spaces.values()]
        self.action_size = max(sizes)
        self._actions = {
            agent: (int(np.prod(space.shape)), space)
            for agent, space in action_spaces.items()
        }
        # Bounds in float64 lose digits in float32, and an action must not exceed them.
        bounds = np.result_type(
            *(space.dtype for space in action_spaces.values())
        )
        shape = (len(self.agents), self.action_size)
        self._low = np.zeros(shape, bounds)
        self._high = np.zeros(shape, bounds)
        for i, (size, space) in enumerate(self._actions.values()):
            self._low[i, :size] = space.low.ravel()
            self._high[i, :size] = space.high.ravel()

    def observations(self, observed: Mapping[str, NDArray[Any]]) -> Floats:
        """Returns observations by agent as one array [N, o]; zeros for an agent without one."""
        rows = np.zeros((len(self.agents), self.observation_size), np.float32)
        for row, agent in zip(rows, self.agents, strict=True):
            if agent in observed:
                values = np.asarray(observed[agent], np.float32).ravel()
                row[: values.size] = values
        return rows

    def actions(
        self, action: Floats, live: list[str]
    ) -> dict[str, NDArray[Any]]:
        """Maps actions [N, a] in [-1, 1] to the bounds of every live agent."""
        share = (action.clip(-1, 1) + 1) / 2
        scaled = self._low + share * (self._high - self._low)
        # Rounding can move the largest action beyond its bound.
        rows = scaled.clip(self._low, self._high)
        bounded: dict[str, NDArray[Any]] = {}
        items = zip(rows, self._actions.items(), strict=True)
        for row, (agent, (size, space)) in items:
            if agent in live:
                bounded[agent] = (
                    row[:size].reshape(space.shape).astype(space.dtype)
                )
        return bounded
