"""The parameters of one role (actors, critics, temperatures) and how they are stepped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.api import OptimizerSettings, Slots, State, restore

ALL = slice(None)


class AgentsRole:
    """A list of parameters and an optimizer for every agent."""

    def __init__(
        self,
        parameters: Sequence[Sequence[nn.Parameter]],
        settings: OptimizerSettings,
    ) -> None:
        self.parameters = [list(agent) for agent in parameters]
        self.settings = settings
        self.clipping = settings.clipping()
        self.optimizers: list[Optimizer] = []

    def leaves(self) -> Iterator[nn.Parameter]:
        """Yields the tensors that collect gradients."""
        for agent in self.parameters:
            yield from agent

    def configure(self, slots: Slots) -> None:
        """Makes the optimizers."""
        self.optimizers = [
            self.settings.make(slots, [*agent]) for agent in self.parameters
        ]

    def zero_grad(self, agents: slice = ALL) -> None:
        """Deletes the gradients of these agents."""
        for parameters in self.parameters[agents]:
            for parameter in parameters:
                parameter.grad = None

    def clip(self, slots: Slots, agents: slice = ALL) -> None:
        """Clips every agent's gradient norm, if there is a bound."""
        if self.clipping is None:
            return
        for parameters, optimizer in zip(
            self.parameters[agents], self.optimizers[agents], strict=True
        ):
            self.clipping(slots, optimizer, parameters)

    def step(self, slots: Slots, agents: slice = ALL) -> None:
        """Steps every agent's optimizer."""
        for optimizer in self.optimizers[agents]:
            slots.optimizer_step(optimizer)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Lets gradients through to the inputs inside the ``with``, but computes none for the
        parameters.
        """
        # The same list is restored, whatever happens to the role in between.
        leaves = list(self.leaves())
        for parameter in leaves:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in leaves:
                parameter.requires_grad_(True)

    def expose_gradients(self) -> None:
        """Makes the gradients visible at the networks' parameters, where they already are."""

    def state_dict(self) -> State:
        """Returns the optimizers' state."""
        return {
            "optimizers": [
                optimizer.state_dict() for optimizer in self.optimizers
            ]
        }

    def load_state_dict(self, state: State) -> None:
        """Restores the optimizers' state."""
        for optimizer, saved in zip(
            self.optimizers, state["optimizers"], strict=True
        ):
            restore(optimizer, saved)


@torch.no_grad()
def polyak(
    targets: Sequence[Tensor], sources: Sequence[Tensor], tau: float
) -> None:
    """Moves every target a share ``tau`` towards its source: t <- (1 - tau) t + tau s."""
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
