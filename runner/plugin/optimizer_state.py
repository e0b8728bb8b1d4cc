"""Moves the state of an optimizer to another one that may compute in another way."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.plugin.optimizer import HOW_TO_COMPUTE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner.plugin.source import State


def restore(optimizer: Optimizer, saved: State) -> None:
    """Loads a state that an optimizer with other kernels may have left; this one keeps its own."""
    groups = [
        {**group, **{name: own[name] for name in HOW_TO_COMPUTE if name in own}, "lr": _like(own["lr"], group["lr"])}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    state = {key: {name: _own(value) for name, value in entry.items()} for key, entry in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": copy.deepcopy(groups)})
    for parameter, entry in optimizer.state.items():
        entry |= {name: _in_order_of(parameter, value) for name, value in entry.items()}


def _like(own: Any, saved: Any) -> Any:
    """A learning rate as this optimizer keeps it: a number, or a tensor that a graph reads."""
    return torch.full_like(own, float(saved)) if isinstance(own, Tensor) else float(saved)


def _own(value: Any) -> Any:
    """A copy, because torch would go on with the very tensors that it is given."""
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def _in_order_of(parameter: Tensor, value: Any) -> Any:
    """The value with the parameter's strides: fused kernels go through both as they lie in memory."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    strides = parameter.stride()
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
