"""Tensors of single networks and of stacks of them, and the state of the optimizers that step the
one or the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.api import State

SHARED = "step"
"""The entry of an optimizer's state that all networks have in common.

Every other tensor has a share for each network.
"""


def as_stacked(tensor: Tensor) -> Tensor:
    """Converts a tensor from a network's shape to that in a stack, and back: a matrix
    is transposed.
    """
    return tensor.T if tensor.dim() == 2 else tensor


def split(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Returns views of a vector that contains one layer after the other."""
    pieces = torch.split(vector, [shape.numel() for shape in shapes])
    return [
        piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
    ]


def as_agent_states(
    vector: State, shapes: Sequence[torch.Size], agents: int
) -> list[State]:
    """Converts the state of one optimizer of a vector to that of one optimizer for every agent.

    Args:
        vector: state of an optimizer whose only parameter is the vector of all layers.
        shapes: shapes of these layers, [networks of all agents, ...] each.
        agents: number of agents, which have equally many networks; the parameters of an agent
            are numbered network by network.

    Returns:
        States whose tensors share memory with ``vector``.
    """
    layers = len(shapes)
    networks = shapes[0][0] // agents
    groups = [
        {**group, "params": [*range(networks * layers)]}
        for group in vector["param_groups"]
    ]
    entries = vector["state"].get(0, {})
    pieces = {
        name: split(value, shapes)
        for name, value in entries.items()
        if _has_shares(name, value)
    }

    def share(row: int, k: int) -> State:
        return {
            name: as_stacked(pieces[name][k][row]) if name in pieces else value
            for name, value in entries.items()
        }

    def state_of(agent: int) -> dict[int, State]:
        first = agent * networks
        return {
            j * layers + k: share(first + j, k)
            for j in range(networks)
            for k in range(layers)
        }

    return [
        {
            # An optimizer without a step has no entries.
            "state": state_of(agent) if entries else {},
            # Each optimizer needs separate groups, because a schedule changes them.
            "param_groups": [dict(group) for group in groups],
        }
        for agent in range(agents)
    ]


def as_vector_state(
    agents: Sequence[State], shapes: Sequence[torch.Size]
) -> State:
    """Reverses ``as_agent_states``: returns the state of one optimizer, in separate memory.

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
        "state": {
            0: {name: whole(name, value) for name, value in entry.items()}
        },
        "param_groups": groups,
    }


def _has_shares(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != SHARED
