"""Slots that every learner has, as they are before a stage wraps them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.system.errors import UsageError


def make_optimizer(
    optimizer: type[Optimizer], parameters: Any, **settings: Any
) -> Optimizer:
    """Makes the optimizer of a role.

    Raises:
        UsageError: torch refuses the settings for these parameters.
    """
    try:
        return optimizer(parameters, **settings)
    # No signature declares these limits: betas below 1, matrices only.
    except ValueError as error:
        raise UsageError(
            f"optimizer: torch.optim.{optimizer.__name__} refuses its settings: {error}"
        ) from error


def zero_grad(optimizer: Optimizer) -> None:
    """Removes the gradients, without the wrappers of ``Optimizer.zero_grad``, which take twenty
    times as long.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


# A function, because torch.compile would trace a ``methodcaller``.
def backward(loss: Tensor) -> None:
    """Computes the gradients of a loss."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def unscale(optimizer: Optimizer) -> None:
    """Does nothing: gradients have their true scale unless a stage scales the loss."""
