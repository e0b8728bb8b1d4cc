"""The parameters that one optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from runner.plugin.context import Context


class Role:
    """A module of a learner and its optimizer: the recipe's ``optimizer``, for all roles or for this one."""

    def __init__(self, name: str, module: nn.Module, context: Context, every: int = 1) -> None:
        """Takes a module; its optimizer is made later, when all stages are attached.

        Args:
            name: among the roles that the learner's settings declare.
            module: what the optimizer steps; parameters that need no gradient stay as they are.
            context: which optimizer it is to be.
            every: how many updates pass between two of its steps; what watches gradients waits as long.
        """
        self.name, self.module, self.every = name, module, every
        self.slots = context.slots
        self.settings = context.optimizers[name]
        self.optimizer: Optimizer

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def configure(self) -> None:
        """Makes the optimizer."""
        groups = self.settings.groups([self.module], self.parameters())
        self.optimizer = self.slots.make_optimizer(self.settings.optimizer(), groups, **self.settings.settings)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self.slots.zero_grad(self.optimizer)

    def step(self) -> None:
        """Clips the gradients if the recipe says so, and steps the optimizer."""
        if self.settings.max_grad_norm is not None:
            self.slots.unscale(self.optimizer)
            self.slots.clip(self.parameters(), self.settings.max_grad_norm)
        self.slots.optimizer_step(self.optimizer)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Lets gradients through to inputs inside the ``with``, but computes none for the parameters."""
        parameters = self.parameters()
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
