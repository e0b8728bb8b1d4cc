"""Steps an environment of agents that move in turns as one of agents that move
together, without repeated queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from runner.api import RunnerError

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

Answer = tuple[
    dict[str, NDArray[Any]],
    dict[str, float],
    Mapping[str, bool],
    Mapping[str, bool],
    Mapping[str, dict[str, Any]],
]


class Steppable(Protocol):
    """The part of a ``ParallelEnv`` that a simulation uses."""

    agents: list[str]

    def reset(
        self, seed: int | None = None
    ) -> tuple[dict[str, NDArray[Any]], Mapping[str, dict[str, Any]]]:
        """Starts an episode: observations and infos by agent."""

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Answer:
        """Observations, rewards, terminations, truncations and infos by agent."""


def steppable(environment: ParallelEnv[str, Any, Any]) -> Steppable:
    """The environment, without PettingZoo's conversion where it was converted from one of agents
    that take turns.
    """
    from pettingzoo.utils import wrappers
    from pettingzoo.utils.conversions import aec_to_parallel_wrapper

    if type(environment) is not aec_to_parallel_wrapper:
        together: Steppable = environment
        return together
    # These only check order and bounds of the actions, which a simulation guarantees.
    watching = (
        wrappers.OrderEnforcingWrapper,
        wrappers.ClipOutOfBoundsWrapper,
        wrappers.AssertOutOfBoundsWrapper,
    )
    turns = environment.aec_env
    while type(turns) in watching:
        turns = turns.env
    return Cycle(turns)


class Cycle:
    """All agents of an environment move in turn, one cycle per step.

    The numbers are those of ``pettingzoo.utils.conversions.aec_to_parallel``, which also requests
    every agent's observation before its turn, and wraps every access in checks of order and bounds.
    """

    def __init__(self, turns: AECEnv[str, Any, Any]) -> None:
        self._turns = turns
        self.agents: list[str] = []

    def reset(
        self, seed: int | None = None
    ) -> tuple[dict[str, NDArray[Any]], Mapping[str, dict[str, Any]]]:
        """Starts an episode: observations and infos by agent."""
        turns = self._turns
        turns.reset(seed=seed)
        self.agents = turns.agents[:]
        return {agent: turns.observe(agent) for agent in self.agents}, turns.infos

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Answer:
        """Gives every agent its turn.

        Returns:
            Observations, rewards (the sums over the turns), terminations, truncations and infos
            by agent.

        Raises:
            RunnerError: the turns are not in the order of ``agents``.
        """
        turns = self._turns
        rewards = dict.fromkeys(self.agents, 0.0)
        for agent in self.agents:
            if turns.agent_selection != agent:
                raise RunnerError(
                    f"{turns}: {agent} was to act, but it is {turns.agent_selection}'s turn"
                )
            turns.step(actions[agent])
            for other in turns.agents:
                rewards[other] += turns.rewards[other]
        ended = dict(turns.terminations), dict(turns.truncations), dict(turns.infos)
        observed = {agent: turns.observe(agent) for agent in turns.agents}
        while turns.agents and (
            turns.terminations[turns.agent_selection]
            or turns.truncations[turns.agent_selection]
        ):
            # An agent that has ended takes its leave.
            turns.step(None)
        self.agents = turns.agents[:]
        return observed, rewards, *ended
