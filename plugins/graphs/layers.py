"""Operations of layers on graphs: from nodes to edges and back, for batches of graphs that are
padded to one size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Returns the nodes at one end of every edge.

    Args:
        x: nodes, [B, N, D].
        index: numbers of nodes, [B, E].

    Returns:
        [B, E, D].
    """
    _, nodes, width = x.shape
    rows = x.flatten(0, 1).index_select(0, _flat(index, nodes))
    return rows.view(*index.shape, width)


def summed(messages: Tensor, index: Tensor, nodes: int) -> Tensor:
    """Returns the sum of the messages at every node.

    Args:
        messages: of every edge, [B, E, D]; those of padding are zero.
        index: where they go, [B, E].
        nodes: how many there are, N.

    Returns:
        [B, N, D].
    """
    graphs = len(messages)
    width = messages.shape[-1]
    zeros = messages.new_zeros(graphs * nodes, width)
    total = zeros.index_add(0, _flat(index, nodes), messages.flatten(0, 1))
    return total.view(graphs, nodes, width)


def _flat(index: Tensor, nodes: int) -> Tensor:
    """Returns numbers of nodes among those of all graphs."""
    first = torch.arange(len(index), device=index.device) * nodes
    return (index + first[:, None]).flatten()
