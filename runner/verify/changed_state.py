"""States of a learner that are far from those of its first updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.plugin.source import State
from runner.system.tensor_trees import map_tensors

_OPTIMIZERS = "optimizers"
"""Key of the states of optimizers in the state of a learner."""
_LEAST_FACTOR = 0.5
"""The smallest factor of a number; the largest is one more."""
_LARGE_STEP = 100.0
"""Factor of the moments by which an optimizer moves parameters."""


def changed_state(state: State) -> dict[str, Any]:
    """Returns a state with other parameters, from which the next update takes a large
    step.

    A few updates may not change an accuracy, so that a value which is computed once and
    used for every evaluation would not show. A number keeps its sign: variances stay
    positive, zeros stay zeros.
    """
    changed = {name: map_tensors(_change, entry) for name, entry in state.items()}
    if _OPTIMIZERS in changed:
        changed[_OPTIMIZERS] = map_tensors(_enlarge, changed[_OPTIMIZERS])
    return changed


def _change(tensor: Tensor) -> Tensor:
    """Multiplies each number by another factor; single numbers, as counts of steps, stay."""
    if not _has_numbers(tensor):
        return tensor
    # Both subjects need the same factors.
    generator = torch.Generator().manual_seed(tensor.numel())
    factors = _LEAST_FACTOR + torch.rand(tensor.shape, generator=generator)
    return tensor * factors.to(tensor.device, tensor.dtype)


def _enlarge(tensor: Tensor) -> Tensor:
    """Multiplies moments that have a direction."""
    # Squares of gradients have no direction.
    if _has_numbers(tensor) and bool((tensor < 0).any()):
        return tensor * _LARGE_STEP
    return tensor


def _has_numbers(tensor: Tensor) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.layout == torch.strided
        and tensor.dim() > 0
    )
