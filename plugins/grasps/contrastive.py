"""The learner that trains an encoder of clouds by comparing views, in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .encoder import ENCODERS, grouped, picked
from .geometry import straightening, yaw
from .network import SCALE

if TYPE_CHECKING:
    from .config import CloudContrastiveConfig


class ContrastiveNetwork(nn.Module):
    """An encoder of clouds under the name that it has in networks of grasps, and a projection that
    only the comparison needs.
    """

    def __init__(self, config: CloudContrastiveConfig) -> None:
        super().__init__()
        width = config.width
        self.encoder = ENCODERS[config.encoder](width, SCALE)
        self.projection = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(
        self, cloud: Tensor, centre: Tensor, neighbour: Tensor
    ) -> Tensor:
        """Returns embeddings [B, width] of clouds [B, P, 3].

        Args:
            cloud: The points.
            centre: Numbers of the centres, [B, M].
            neighbour: Numbers of their neighbours, [B, M, N].
        """
        tokens = self.encoder(cloud, centre, neighbour)
        embedding: Tensor = self.projection(tokens.mean(1))
        return embedding


class CloudContrastive(GradientLearner):
    """Recognizes the other view of each cloud."""

    module: ContrastiveNetwork
    config: CloudContrastiveConfig

    def build(
        self,
        config: CloudContrastiveConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the encoder with its projection."""
        return ContrastiveNetwork(config)

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns what makes two views: ``order`` [B, 2, P], ``jitter`` [B, 2, P, 3] and ``turn``
        [B, 2].
        """
        rows, points, _ = batch["cloud"].shape
        device = generator.device
        shape = (rows, 2, points)
        return {
            "order": torch.rand(shape, generator=generator, device=device),
            "jitter": torch.randn(
                (*shape, 3), generator=generator, device=device
            ),
            "turn": torch.rand((rows, 2), generator=generator, device=device),
        }

    def views(self, cloud: Tensor, noise: Batch) -> Tensor:
        """Returns the first views of clouds [B, P, 3], then the second ones: [2 B, Q, 3]."""
        config = self.config
        least = max(config.centres, config.neighbours)
        count = max(least, round(config.share * cloud.shape[1]))
        views = []
        for view in range(2):
            points = noise["order"][:, view].argsort(1)[:, :count]
            jitter = picked(noise["jitter"][:, view], points)
            moved = picked(cloud, points) + config.jitter_mm / 1e3 * jitter
            angle = (2 * noise["turn"][:, view] - 1) * math.radians(
                config.degrees
            )
            views.append(moved @ yaw(angle).transpose(1, 2))
        return torch.cat(views)

    def embedded(self, cloud: Tensor) -> Tensor:
        """Returns the embeddings of clouds, [B, P, 3] to [B, width]."""
        with torch.no_grad():
            groups = grouped(cloud, self.config.centres, self.config.neighbours)
            if self.config.straighten:
                rotation = straightening(cloud)[:, None]
                # As for grasps: no matrix product, whose rounding depends on the batch.
                cloud = (rotation * cloud[..., None, :]).sum(-1)
        embedding: Tensor = self.slots.forward(cloud, *groups)
        return embedding

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the cross-entropy of the other view among those of the batch, in both directions,
        and the share of views that are recognized.
        """
        with torch.no_grad():
            views = self.views(batch["cloud"], noise)
        first, second = self.embedded(views).chunk(2)
        similarity = similarities(first, second, self.config.temperature)
        rows = len(similarity)
        label = torch.arange(rows, device=similarity.device)
        forward = F.cross_entropy(similarity, label, reduction="sum")
        backward = F.cross_entropy(similarity.T, label, reduction="sum")
        recognized = (similarity.detach().argmax(1) == label).sum()
        means = {"recognized": Mean(recognized, rows)}
        return Loss((forward + backward) / 2, rows, means)

    def inputs(self, batch: Batch) -> Any:
        """Returns the clouds."""
        return batch["cloud"]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Tensor:
        """Returns the embeddings of clouds, [B, P, 3] to [B, width]."""
        with self.evaluating():
            return self.embedded(inputs)


def similarities(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Returns the cosines of all pairs divided by a temperature, [B, width] twice to [B, B]: the
    logits of InfoNCE (van den Oord et al., arXiv:1807.03748).
    """
    cosines = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
    return cosines / temperature
