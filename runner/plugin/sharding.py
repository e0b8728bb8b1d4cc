"""States of learners whose parameters are divided among processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from runner.plugin.averages import AVERAGES
from runner.plugin.module_state import copied_state
from runner.system.tensor_trees import map_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from runner.plugin.learner import Learner
    from runner.plugin.source import State


class Sharding(Protocol):
    """Converts between whole tensors and the parts of processes."""

    def is_divided(self, tensor: Tensor) -> bool:
        """Returns whether a process has only a part of a tensor."""

    def part_of(self, tensor: Tensor) -> Tensor:
        """Returns the numbers of a tensor that this process has."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a tensor as a single process has it; all processes have to call it."""

    def divided_like(self, tensor: Tensor, example: Tensor) -> Tensor:
        """Returns the part of a whole tensor that this process has, if the example is divided."""


def whole_state(state: State, sharding: Sharding) -> State:
    """Returns a learner's state with whole tensors; all processes have to call it."""
    whole: State = map_tensors(sharding.whole, state)
    return whole


def divided_state(state: State, learner: Learner, sharding: Sharding) -> State:
    """Returns a learner's state with the parts of this process, as ``load_state_dict`` needs it.

    Args:
        state: Of whole tensors, from this learner or one that is not divided.
        learner: The learner that will load it.
        sharding: Divides tensors.
    """
    divided = dict(state)
    divided["modules"] = {}
    for name, module in learner.modules().items():
        divided["modules"][name] = _divided(
            state["modules"][name], module.state_dict(), sharding
        )
    divided["optimizers"] = {}
    for name, optimizer in learner.optimizers():
        divided["optimizers"][name] = _divided_moments(
            state["optimizers"][name], optimizer, sharding
        )
    if learner.averages is not None and AVERAGES in state:
        divided[AVERAGES] = _divided(state[AVERAGES], learner.averages.values, sharding)
    return divided


def _divided(
    values: Mapping[str, Any], examples: Mapping[str, Any], sharding: Sharding
) -> dict[str, Any]:
    """Returns values with those divided whose examples of the same name are."""
    divided = copied_state(values)
    for name in values.keys() & examples.keys():
        divided[name] = sharding.divided_like(values[name], examples[name])
    return divided


def _divided_moments(
    state: Mapping[str, Any], optimizer: Optimizer, sharding: Sharding
) -> dict[str, Any]:
    """Returns the state of an optimizer with moments that are divided like their parameters."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    moments = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        entry = dict(moments.get(number, {}))
        for name, value in entry.items():
            # Other entries, such as counts of steps, are the same in all processes.
            if getattr(value, "shape", None) == parameter.shape and parameter.dim():
                entry[name] = sharding.divided_like(value, parameter)
        if entry:
            moments[number] = entry
    return {**state, "state": moments}
