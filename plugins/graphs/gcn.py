"""A graph convolutional network in torch (Kipf and Welling 2017, arXiv 1609.02907)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .layers import gathered, summed

if TYPE_CHECKING:
    from .config import GcnConfig

INPUTS = ("x", "edge", "weight")
"""Of a batch, what the network reads."""
Features = Callable[[Batch], Tensor]
"""A graph to what the first layer takes, [B, N, F]."""
Aggregate = Callable[[int, Tensor, Batch], Tensor]
"""The number of a layer, its nodes [B, N, D], and the graph, to what arrives at them, [B, N, D]."""


class GcnNetwork(nn.Module):
    """A network from features of nodes [B, N, F] to logits [B, N, classes]: each layer mixes, then
    averages over neighbours.
    """

    def __init__(
        self,
        inputs: int,
        config: GcnConfig,
        classes: int,
        features: Features,
        aggregate: Aggregate,
    ) -> None:
        super().__init__()
        self.features = features
        self.aggregate = aggregate
        widths = [inputs, *[config.width] * (config.layers - 1), classes]
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
        self.weights = nn.ModuleList(layers)
        self.widths = widths[1:]
        self.biases = nn.ParameterList(
            nn.Parameter(torch.zeros(width)) for width in self.widths
        )
        self.dropout = config.dropout
        self.input_dropout = (
            config.dropout if config.input_dropout is None else config.input_dropout
        )

    def forward(self, graph: Batch) -> Tensor:
        """The logits."""
        x = F.dropout(self.features(graph), self.input_dropout, self.training)
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            x = self.aggregate(layer, weight(x), graph) + bias
            if layer + 1 < len(self.weights):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


def propagate(x: Tensor, edge: Tensor, weight: Tensor) -> Tensor:
    """Sums over the edges that arrive at a node.

    Args:
        x: [B, N, D].
        edge: from which node to which, [B, E, 2].
        weight: [B, E].

    Returns:
        [B, N, D].
    """
    return summed(
        gathered(x, edge[..., 0]) * weight[..., None], edge[..., 1], x.shape[1]
    )


class Gcn(GradientLearner):
    """Cross-entropy of the nodes that count."""

    module: GcnNetwork

    def build(
        self, config: Any, shapes: Mapping[str, tuple[int, ...]], context: Context
    ) -> nn.Module:
        """Returns the network, with features and average as slots for stages."""
        slots = self.slots
        held = (
            lambda graph: slots.features(graph),
            lambda *inputs: slots.aggregate(*inputs),
        )
        return GcnNetwork(shapes["x"][-1], config, context.sizes["classes"], *held)

    def features(self, graph: Batch) -> Tensor:
        """Returns the features of the nodes, [B, N, F]."""
        x: Tensor = graph["x"]
        return x

    def aggregate(self, layer: int, x: Tensor, graph: Batch) -> Tensor:
        """Returns the weighted sum over every node and its neighbours; the same after every
        layer.
        """
        return propagate(x, graph["edge"], graph["weight"])

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Cross-entropy and accuracy."""
        logits = self.slots.forward(self.graph(batch, progress))[batch["mask"]]
        label = batch["label"][batch["mask"]]
        correct = (logits.detach().argmax(-1) == label).sum()
        return Loss(
            F.cross_entropy(logits, label, reduction="sum"),
            len(label),
            {"accuracy": Mean(correct, len(label))},
        )

    def graph(self, batch: Batch, progress: Progress) -> Batch:
        """Returns the input of the network in an update."""
        return self.inputs(batch)

    def inputs(self, batch: Batch) -> Batch:
        """Returns the graph without its labels."""
        return {name: batch[name] for name in INPUTS}
