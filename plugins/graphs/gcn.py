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
"""The tensors of a batch that the network reads."""
Features = Callable[[Batch], Tensor]
"""Returns the input of the first layer, [B, N, F], for a graph."""
Aggregate = Callable[[int, Tensor, Batch], Tensor]
"""Returns what arrives at the nodes, [B, N, D], for a layer's number, its nodes, and the graph."""


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
        self.input_dropout = config.dropout
        if config.input_dropout is not None:
            self.input_dropout = config.input_dropout

    def forward(self, graph: Batch) -> Tensor:
        """Returns the logits."""
        x = F.dropout(self.features(graph), self.input_dropout, self.training)
        layers = zip(self.weights, self.biases, strict=True)
        for layer, (weight, bias) in enumerate(layers):
            # The weights come first: they make the vectors that are averaged shorter.
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
    origin, target = edge.unbind(-1)
    messages = gathered(x, origin) * weight[..., None]
    return summed(messages, target, x.shape[1])


class Gcn(GradientLearner):
    """Cross-entropy of the nodes that count."""

    module: GcnNetwork

    def build(
        self,
        config: Any,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the network, with features and average as slots for stages."""
        slots = self.slots
        return GcnNetwork(
            shapes["x"][-1],
            config,
            context.sizes["classes"],
            # A slot is looked up at each call, because stages replace it later.
            features=lambda graph: slots.features(graph),
            aggregate=lambda *inputs: slots.aggregate(*inputs),
        )

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
        """Returns the sum of cross-entropies over the masked nodes, and the accuracy."""
        mask = batch["mask"]
        logits = self.slots.forward(self.graph(batch, progress))[mask]
        label = batch["label"][mask]
        count = len(label)

        correct = (logits.detach().argmax(-1) == label).sum()
        accuracy = {"accuracy": Mean(correct, count)}
        weights = self.context.class_weights
        # Held-out losses are those of a training without weights.
        if weights is None or not self.module.training:
            return Loss(
                F.cross_entropy(logits, label, reduction="sum"), count, accuracy
            )
        weights = weights.to(logits.dtype)
        total = F.cross_entropy(logits, label, weights, reduction="sum")
        return Loss(total, weights[label].sum(), accuracy)

    def graph(self, batch: Batch, progress: Progress) -> Batch:
        """Returns the input of the network in an update."""
        return self.inputs(batch)

    def inputs(self, batch: Batch) -> Batch:
        """Returns the graph without its labels."""
        return {name: batch[name] for name in INPUTS}
