"""Tensors of single networks and of stacks of them, and the state of the optimizers that step the
one or the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.api import State

SHARED = "step"
"""The entry of an optimizer's state that all networks have in common; every other tensor has a
share for each.
"""


def as_stacked(tensor: Tensor) -> Tensor:
    """Converts a tensor from a network's shape to that in a stack, and back: a matrix
    is transposed.
    """
    return tensor.T if tensor.dim() == 2 else tensor


def split(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a vector that holds one layer after the other."""
    pieces = torch.split(vector, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def apart(vector: State, shapes: Sequence[torch.Size], agents: int) -> list[State]:
    """The state of one optimizer of a vector as that of one optimizer for every agent.

    Args:
        vector: of an optimizer whose only parameter is the vector of all layers.
        shapes: of these layers, [networks of all agents, ...] each.
        agents: how many share the networks out evenly; a parameter of theirs is numbered network
            by network.

    Returns:
        States whose tensors share memory with ``vector``.
    """
    layers = len(shapes)
    networks = shapes[0][0] // agents
    groups = [
        {**group, "params": [*range(networks * layers)]}
        for group in vector["param_groups"]
    ]
    whole = vector["state"].get(0, {})
    pieces = {
        name: split(value, shapes)
        for name, value in whole.items()
        if _has_shares(name, value)
    }

    def share(row: int, k: int) -> State:
        return {
            name: as_stacked(pieces[name][k][row]) if name in pieces else value
            for name, value in whole.items()
        }

    return [
        {
            "state": {
                j * layers + k: share(agent * networks + j, k)
                for j in range(networks)
                for k in range(layers)
            }
            if whole
            else {},
            "param_groups": [dict(group) for group in groups],
        }
        for agent in range(agents)
    ]


def together(agents: Sequence[State], shapes: Sequence[torch.Size]) -> State:
    """Returns the state of one optimizer of a vector, in separate memory; the reverse of ``apart``.

    Raises:
        ValueError: the agents have taken different numbers of steps, which one optimizer cannot.
    """
    layers = len(shapes)
    networks = shapes[0][0] // len(agents)
    groups = [{**group, "params": [0]} for group in agents[0]["param_groups"]]
    if not agents[0]["state"]:
        return {"state": {}, "param_groups": groups}

    def whole(name: str, first: Any) -> Any:
        values = [
            agent["state"][j * layers + k][name]
            for k in range(layers)
            for agent in agents
            for j in range(networks)
        ]
        if _has_shares(name, first):
            return torch.cat([as_stacked(value).flatten() for value in values])
        if any(value != first for value in values):
            raise ValueError(
                "the agents have taken different numbers of optimizer steps; stacked agents "
                "step together"
            )
        return first

    entry = agents[0]["state"][0]
    return {
        "state": {0: {name: whole(name, value) for name, value in entry.items()}},
        "param_groups": groups,
    }


def _has_shares(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != SHARED
