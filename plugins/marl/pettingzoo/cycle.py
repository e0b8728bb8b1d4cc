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
        """Starts an episode and returns observations and infos by agent."""

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Answer:
        """Returns observations, rewards, terminations, truncations and infos by agent."""


def steppable(environment: ParallelEnv[str, Any, Any]) -> Steppable:
    """Returns the environment, without PettingZoo's conversion from a turn-based one."""
    from pettingzoo.utils import wrappers
    from pettingzoo.utils.conversions import aec_to_parallel_wrapper

    if type(environment) is not aec_to_parallel_wrapper:
        parallel: Steppable = environment
        return parallel
    # These only check order and bounds of the actions, which a simulation guarantees.
    checkers = (
        wrappers.OrderEnforcingWrapper,
        wrappers.ClipOutOfBoundsWrapper,
        wrappers.AssertOutOfBoundsWrapper,
    )
    turn_based = environment.aec_env
    while type(turn_based) in checkers:
        turn_based = turn_based.env
    return Cycle(turn_based)


class Cycle:
    """A turn-based environment in which a step is one cycle of all agents.

    The numbers are those of ``pettingzoo.utils.conversions.aec_to_parallel``, which also requests
    every agent's observation before its turn, and wraps every access in checks of order and bounds.
    """

    def __init__(self, turns: AECEnv[str, Any, Any]) -> None:
        self._turns = turns
        self.agents: list[str] = []

    def reset(
        self, seed: int | None = None
    ) -> tuple[dict[str, NDArray[Any]], Mapping[str, dict[str, Any]]]:
        """Starts an episode and returns observations and infos by agent."""
        turns = self._turns
        turns.reset(seed=seed)
        self.agents = turns.agents[:]
        return {
            agent: turns.observe(agent) for agent in self.agents
        }, turns.infos

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Answer:
        """Steps every agent once.

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
            for receiver in turns.agents:
                rewards[receiver] += turns.rewards[receiver]
        # Copies, because the environment removes agents that have ended from its dictionaries.
        endings = (
            dict(turns.terminations),
            dict(turns.truncations),
            dict(turns.infos),
        )
        observations = {agent: turns.observe(agent) for agent in turns.agents}
        while turns.agents:
            agent = turns.agent_selection
            if not turns.terminations[agent] and not turns.truncations[agent]:
                break
            # PettingZoo requires an empty action of an agent that has ended.
            turns.step(None)
        self.agents = turns.agents[:]
        return observations, rewards, *endings
