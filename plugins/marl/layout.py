"""Tensors of single networks and of stacks of them, and the state of the optimizers that step the one or the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.api import State

SHARED = "step"
"""The entry of an optimizer's state that all networks have in common; every other tensor has a share for each."""


def as_stacked(tensor: Tensor) -> Tensor:
    """From a network's own shape to that in a stack, and back: a matrix is transposed."""
    return tensor.T if tensor.dim() == 2 else tensor


def apart(stacked: State, agents: int, networks: int) -> list[State]:
    """The state of one optimizer of stacks as that of one optimizer for every agent.

    Args:
        stacked: of an optimizer with one parameter for every layer, [agents x networks, ...].
        agents: how many there are.
        networks: how many each of them has; its parameters are numbered network by network.

    Returns:
        States whose tensors share memory with ``stacked``.
    """
    layers = sum(len(group["params"]) for group in stacked["param_groups"])
    groups = [
        {**group, "params": [j * layers + k for j in range(networks) for k in group["params"]]}
        for group in stacked["param_groups"]
    ]

    def share(agent: int, j: int, entry: State) -> State:
        row = agent * networks + j
        return {name: as_stacked(value[row]) if _has_shares(name, value) else value for name, value in entry.items()}

    return [
        {
            "state": {
                j * layers + k: share(agent, j, entry) for j in range(networks) for k, entry in stacked["state"].items()
            },
            "param_groups": [dict(group) for group in groups],
        }
        for agent in range(agents)
    ]


def together(agents: Sequence[State], networks: int) -> State:
    """The state of one optimizer of stacks, in memory of its own; the reverse of ``apart``.

    Raises:
        ValueError: the agents have taken different numbers of steps, which one optimizer cannot.
    """
    first = agents[0]
    layers = sum(len(group["params"]) for group in first["param_groups"]) // networks
    groups = [{**group, "params": [k for k in group["params"] if k < layers]} for group in first["param_groups"]]
    state = {}
    for k in (k for k in first["state"] if k < layers):
        entries = [agent["state"][j * layers + k] for agent in agents for j in range(networks)]
        state[k] = {name: _stack(name, [entry[name] for entry in entries]) for name in entries[0]}
    return {"state": state, "param_groups": groups}


def _has_shares(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != SHARED


def _stack(name: str, values: Sequence[Any]) -> Any:
    if _has_shares(name, values[0]):
        return torch.stack([as_stacked(value) for value in values])
    if any(value != values[0] for value in values):
        raise ValueError("the agents have taken different numbers of optimizer steps; stacked agents step together")
    return values[0]
