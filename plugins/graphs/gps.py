"""A graph transformer in torch (Rampášek et al. 2022, "Recipe for a General, Powerful, Scalable
Graph Transformer").

arXiv 2205.12454; the local part is GINE (Hu et al. 2020, arXiv 1905.12265).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .attention import Attention
from .layers import gathered, summed

if TYPE_CHECKING:
    from .config import GpsConfig

BONDS = 5
"""Kinds of bonds, including none."""
INPUTS = ("x", "edge", "bond", "mask")
"""The tensors of a batch that the network reads."""


class Gine(nn.Module):
    """Messages along edges: nn((1 + eps) x_i + sum over j of relu(x_j + e_ij))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.epsilon = nn.Parameter(torch.zeros(1))
        self.update = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(
        self, x: Tensor, edge: Tensor, real: Tensor, kind: Tensor
    ) -> Tensor:
        """Returns the updated nodes, [B, N, width].

        Args:
            x: Nodes, [B, N, width].
            edge: Edges from node to node, [B, E, 2].
            real: True for edges that are not padding, [B, E].
            kind: Embedding of an edge's type, [B, E, width].
        """
        origin = edge[..., 0]
        target = edge[..., 1]
        # Padding has edges of node 0 to itself, which must send nothing.
        messages = F.relu(gathered(x, origin) + kind) * real[..., None]
        weighted = (1 + self.epsilon) * x
        received = summed(messages, target, x.shape[1])
        updated: Tensor = self.update(weighted + received)
        return updated


class Fusion(nn.Module):
    """Puts two streams together: their sum, or 2 g of one and 2 (1 - g) of the other, with g one
    half at first.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        # All gates start at zero, so that both streams have the same weight, 2 * sigmoid(0) = 1.
        if kind == "node":
            self.gate = nn.Linear(2 * width, 1)
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)
        elif kind != "sum":
            self.logit = nn.Parameter(
                torch.zeros(width if kind == "channel" else 1)
            )

    def forward(self, local: Tensor, everywhere: Tensor) -> Tensor:
        """Returns the combination of two tensors [B, N, width], in the same shape."""
        if self.kind == "sum":
            return local + everywhere
        if self.kind == "node":
            logit = self.gate(torch.cat([local, everywhere], -1))
        else:
            logit = self.logit
        share = torch.sigmoid(logit)
        return 2 * (share * local + (1 - share) * everywhere)


class GpsLayer(nn.Module):
    """Messages and attention in parallel, combined, and a feed-forward layer.

    Each is normalised after it is added to its input.
    """

    def __init__(self, config: GpsConfig) -> None:
        super().__init__()
        width = config.width
        self.dropout = config.dropout
        self.local = Gine(width)
        self.attention = Attention(width, config.heads)
        self.fusion = Fusion(config.fusion, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.norm1, self.norm2, self.norm3 = (
            nn.LayerNorm(width) for _ in range(3)
        )

    def forward(
        self, x: Tensor, edge: Tensor, real: Tensor, kind: Tensor, mask: Tensor
    ) -> Tensor:
        """Computes the layer like ``Gine``, with ``mask`` of the nodes that are not
        padding, [B, N].
        """
        local = self.norm1(x + self._drop(self.local(x, edge, real, kind)))
        everywhere = self.norm2(x + self._drop(self.attention(x, mask)))
        fused = self.fusion(local, everywhere)
        output: Tensor = self.norm3(fused + self._drop(self.feed(fused)))
        return output

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GpsNetwork(nn.Module):
    """A network from graphs to one number each, [B]."""

    def __init__(self, inputs: int, config: GpsConfig) -> None:
        super().__init__()
        width = config.width
        self.enter = nn.Linear(inputs, width)
        self.kinds = nn.Embedding(BONDS, width)
        self.blocks = nn.ModuleList(
            GpsLayer(config) for _ in range(config.layers)
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, graph: Batch) -> Tensor:
        """Returns one number per graph, computed from the mean over its nodes."""
        edge = graph["edge"]
        bond = graph["bond"]
        mask = graph["mask"]
        x = self.enter(graph["x"])
        kind = self.kinds(bond)
        real = bond > 0
        for block in self.blocks:
            x = block(x, edge, real, kind, mask)
        # Attention and biases give padding values, too; the mean is over real nodes.
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        number: Tensor = self.head(pooled)
        return number.squeeze(-1)


class Gps(GradientLearner):
    """Squared error of standardised targets."""

    module: GpsNetwork

    def build(
        self,
        config: GpsConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """The network."""
        return GpsNetwork(shapes["x"][-1], config)

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the sum of squared errors over graphs."""
        target = batch["target"]
        count = len(target)
        prediction = self.slots.forward(self.inputs(batch))
        error = F.mse_loss(prediction, target, reduction="sum")
        samples = self.sample_losses(lambda: (prediction - target).square())
        squared_error = {"squared_error": Mean(error.detach(), count)}
        return Loss(error, count, squared_error, samples)

    def inputs(self, batch: Batch) -> Batch:
        """The graphs without their targets."""
        return {name: batch[name] for name in INPUTS}
