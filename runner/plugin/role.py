"""A group of parameters with a separate optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn, strided
from torch.optim import Optimizer

from runner.system.errors import RunnerError

if TYPE_CHECKING:
    from runner.plugin.context import Context


class Role:
    """A module of a learner and its optimizer: the recipe's ``optimizer``, for all roles or for
    this one.
    """

    optimizer: Optimizer
    """Exists as soon as all stages are attached."""

    def __init__(
        self, name: str, module: nn.Module, context: Context, every: int = 1
    ) -> None:
        self.module = module
        self.slots = context.slots
        self.settings = context.optimizers[name]
        self.every = every
        """Number of updates for each of its steps; guards of gradients wait as long."""
        # Read once, because reading a setting takes microseconds in every update.
        self.clipping = self.settings.clipping()

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that need a gradient now."""
        parameters = self.module.parameters()
        return [parameter for parameter in parameters if parameter.requires_grad]

    def zero_grad(self) -> None:
        """Removes the gradients."""
        self.slots.zero_grad(self.optimizer)

    def step(self) -> None:
        """Clips the gradients if the recipe requires it, and steps the optimizer."""
        if self.clipping is not None:
            parameters = self._stepped_parameters()
            try:
                self.clipping(self.slots, self.optimizer, parameters)
            except NotImplementedError as error:
                gradients = [parameter.grad for parameter in parameters]
                if all(grad is None or grad.layout == strided for grad in gradients):
                    raise
                raise RunnerError(
                    "optimizer.max_grad_norm: torch cannot clip sparse gradients; remove it, or "
                    "build the embedding with sparse=False"
                ) from error
        self.slots.optimizer_step(self.optimizer)

    def _stepped_parameters(self) -> list[Tensor]:
        """Returns the parameters that the optimizer steps.

        The gradient of another one must not count in the norm, because nothing clears it.
        """
        stepped = {
            id(parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = self.parameters()
        selected = [parameter for parameter in parameters if id(parameter) in stepped]
        # An optimizer that steps copies of the parameters has none of them: all gradients count.
        return selected or parameters

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Lets gradients through to inputs inside the ``with``, but computes none for the
        parameters.
        """
        parameters = self.parameters()
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
