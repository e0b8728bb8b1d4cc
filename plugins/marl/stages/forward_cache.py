"""Policy forwards that one update would repeat."""

from collections.abc import Callable
from typing import Any, ClassVar

from runner.api import (
    Batch,
    Exact,
    Pipeline,
    Setting,
    Stage,
    StageConfig,
    UsageError,
)


class ForwardCacheConfig(StageConfig):
    """Computes every policy's next and current actions once per update instead of once per agent.

    The targets of all N agents need the same N next actions, and their actor losses the same N
    current actions: the plain update computes N^2 of each. Next actions are cached without a
    gradient, current actions with one (each agent's graph, detached for the other agents); actions
    from the replay buffer are data and are not cached. The cache is cleared before and after every
    update, so nothing outlives the parameters of its computation.

    When it helps: always, and the more the more agents there are.
    When it hurts: it holds the activations of N policies until the actor step is over.
    """

    kind: ClassVar[str] = "forward_cache"
    implementation = "ForwardCache"
    phase: ClassVar[int] = 1
    wraps: ClassVar[frozenset[str]] = frozenset(
        {"update", "next_actions", "current_action"}
    )

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same bits."""
        return Exact()

    def inactive(self, setting: Setting) -> None:
        """Returns None, because it always has an effect.

        Raises:
            UsageError: forwards would be reused between compiled functions that each free what
                they made.
        """
        if (
            "compile" in setting.stages
            and "stacked_agents" not in setting.stages
        ):
            raise UsageError(
                "forward_cache cannot work with compile on agents that are not stacked: "
                "switch stacked_agents on, or one of the two off"
            )


class ForwardCache(Stage):
    """Stores the results of forwards until the update is over."""

    def attach(self, pipeline: Pipeline) -> None:
        """Wraps the two forwards with a cache, and the update with functions that clear it."""
        self.next: Any = None
        self.current: dict[int | None, Any] = {}
        pipeline.slots.wrap("next_actions", self._remember_next)
        pipeline.slots.wrap("current_action", self._remember_current)
        pipeline.slots.wrap("update", self._forget_around)

    def _remember_next(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def next_actions(batch: Batch, noise: Batch) -> Any:
            if self.next is None:
                self.next = step(batch, noise)
            return self.next

        return next_actions

    def _remember_current(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def current_action(batch: Batch, noise: Batch, agents: slice) -> Any:
            # One call for all agents: nothing can be reused.
            if agents.start is None:
                return step(batch, noise, agents)
            if agents.start not in self.current:
                # The first caller may need no gradient, and a later one does.
                with torch.enable_grad():
                    self.current[agents.start] = step(batch, noise, agents)
            action, log_prob = self.current[agents.start]
            if torch.is_grad_enabled():
                return action, log_prob
            # The loss of another agent must not reach this agent's parameters.
            return action.detach(), log_prob.detach()

        return current_action

    def _forget_around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def update(*arguments: Any) -> Any:
            # An interrupted update leaves results of other parameters.
            self._forget()
            try:
                return step(*arguments)
            finally:
                self._forget()

        return update

    def _forget(self) -> None:
        self.next = None
        self.current.clear()
