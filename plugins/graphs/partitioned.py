"""A graph convolutional network on a graph in parts, which send each other what nodes at their
borders hold.

The parts live in one process, which computes what each of them would and counts the bytes that
would be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from runner.api import Batch, Context, Loss, Mean, Progress, UsageError

from .gcn import Gcn, GcnNetwork, propagate
from .layers import gathered, summed

if TYPE_CHECKING:
    from .config import PartitionedGcnConfig

FLOAT = 4
"""Bytes of a number that is sent."""


class PartitionedNetwork(GcnNetwork):
    """Nodes of other parts count with what they sent last; gradients go through what was sent in
    this update alone.
    """

    def __init__(
        self,
        nodes: int,
        inputs: int,
        config: PartitionedGcnConfig,
        classes: int,
    ) -> None:
        super().__init__(
            inputs, config, classes, lambda graph: graph["x"], self.exchanged
        )
        for layer, width in enumerate(self.widths):
            self.register_buffer(f"sent{layer}", torch.zeros(1, nodes, width))

    def exchanged(self, layer: int, x: Tensor, graph: Batch) -> Tensor:
        """Returns the average over the known values: all values, unless ``fresh``
        selects the nodes that send.

        Emma keeps, at a receiver, the sum over remote neighbours and corrects it by w (new - old)
        for those that send. That is the sum over what every one of them sent last, which is
        computed here.
        """
        if "fresh" not in graph:
            return propagate(x, graph["edge"], graph["weight"])
        sent: Tensor = getattr(self, f"sent{layer}")
        remote = torch.where(graph["fresh"][..., None], x, sent.to(x.dtype))
        # Gradients do not reach earlier updates, whose activations no longer exist.
        sent.copy_(remote.detach())

        origin, target = graph["edge"].unbind(-1)
        origin_part = graph["part"].gather(1, origin)
        target_part = graph["part"].gather(1, target)
        crosses = (origin_part != target_part)[..., None]
        messages = torch.where(
            crosses, gathered(remote, origin), gathered(x, origin)
        )
        return summed(messages * graph["weight"][..., None], target, x.shape[1])


class PartitionedGcn(Gcn):
    """Trains with the exchange of the recipe; evaluates on the entire graph."""

    module: PartitionedNetwork

    def build(
        self,
        config: PartitionedGcnConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """The network, with room for what each node sent last.

        Raises:
            UsageError: the graph has no parts.
        """
        if "part" not in shapes:
            raise UsageError(
                "data.parts: model 'partitioned_gnn' needs two parts or more"
            )
        nodes, inputs = shapes["x"]
        return PartitionedNetwork(
            nodes, inputs, config, context.sizes["classes"]
        )

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Cross-entropy, accuracy, and in training the bytes that cross a border, forwards."""
        loss = super().loss(batch, noise, progress)
        # Evaluation uses the current values of all nodes, as one machine would.
        if not self.module.training:
            return loss
        is_sending = self.sends(batch["turn"], progress.updates)
        copies = (batch["readers"] * is_sending).sum()
        bytes_sent = copies * FLOAT * sum(self.module.widths)
        return loss._replace(
            also={**loss.also, "bytes_sent": Mean(bytes_sent, 1)}
        )

    def graph(self, batch: Batch, progress: Progress) -> Batch:
        """Returns the graph; in training, with the parts and the mask of nodes that send."""
        graph = super().graph(batch, progress)
        if not self.module.training:
            return graph
        return {
            **graph,
            "part": batch["part"],
            "fresh": self.sends(batch["turn"], progress.updates),
        }

    def sends(self, turn: Tensor, update: int) -> Tensor:
        """Returns which nodes send in an update, [B, N]; all do in the first one."""
        chunks: int = self.config.chunks
        # Without the first exchange, the remote values would be the zeros of the buffers.
        if self.config.exchange == "full_halo" or update == 0:
            return torch.ones_like(turn, dtype=torch.bool)
        if self.config.exchange == "historical":
            return torch.full_like(turn, update % chunks == 0, dtype=torch.bool)
        return turn % chunks == update % chunks
