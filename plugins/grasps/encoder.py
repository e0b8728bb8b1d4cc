"""Encodes a cloud of points as a few tokens, each of a neighbourhood (PointNet++, arXiv
1706.02413).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)


def farthest_points(cloud: Tensor, count: int) -> Tensor:
    """Returns numbers [B, count] of points of clouds [B, P, 3], each as far as possible from the
    previous ones.

    The first is the one that is farthest from the mean, so that the order of the points does not
    matter.
    """
    rows = torch.arange(len(cloud), device=cloud.device)
    distance = (cloud - cloud.mean(1, keepdim=True)).square().sum(-1)
    selected = [distance.argmax(1)]
    distance = torch.full_like(distance, torch.inf)
    for _ in range(count - 1):
        latest = cloud[rows, selected[-1], None]
        to_latest = (cloud - latest).square().sum(-1)
        distance = torch.minimum(distance, to_latest)
        selected.append(distance.argmax(1))
    return torch.stack(selected, 1)


def grouped(
    cloud: Tensor, centres: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Returns centres [B, M] of a cloud [B, P, 3], and the points nearest to each, [B, M, N].

    Both are numbers of points. Those of a cloud do not depend on the other clouds of the batch.
    """
    centre = farthest_points(cloud, centres)
    # As products of matrices, distances would depend on the batch, and close ones would be wrong.
    distance = torch.cdist(
        picked(cloud, centre),
        cloud,
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return centre, distance.topk(neighbours, largest=False).indices


def picked(values: Tensor, index: Tensor) -> Tensor:
    """Returns the values of points, [B, P, D], at numbers [B, ...]: [B, ..., D]."""
    flat = index.flatten(1)[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, flat).view(*index.shape, values.shape[-1])


class PointNetLite(nn.Module):
    """Encoder of neighbourhoods as tokens: two layers for every point, then the maximum."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(
            nn.Linear(6, width // 2), nn.ReLU(), nn.Linear(width // 2, width)
        )
        self.place = nn.Linear(3, width)

    def forward(
        self, cloud: Tensor, centre: Tensor, neighbour: Tensor
    ) -> Tensor:
        """Returns tokens [B, M, width] of clouds [B, P, 3].

        Args:
            cloud: The points.
            centre: Numbers of the centres, [B, M].
            neighbour: Numbers of their neighbours, [B, M, N].
        """
        points = picked(cloud, neighbour) / self.scale
        middle = picked(cloud, centre) / self.scale
        # Distances within a neighbourhood are about a quarter of those within a cloud.
        offsets = 4 * (points - middle[:, :, None])
        features = torch.cat([points, offsets], -1)
        tokens: Tensor = self.layers(features).amax(2) + self.place(middle)
        return tokens


class PointNet2(nn.Module):
    """Encoder in two levels: neighbourhoods of the tokens of neighbourhoods."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.first = PointNetLite(width, scale)
        self.second = nn.Sequential(
            nn.Linear(width + 3, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(
        self, cloud: Tensor, centre: Tensor, neighbour: Tensor
    ) -> Tensor:
        """Returns tokens like ``PointNetLite``."""
        tokens: Tensor = self.first(cloud, centre, neighbour)
        middle = picked(cloud, centre)
        distances = torch.cdist(middle, middle)
        count = min(8, middle.shape[1])
        nearest = distances.topk(count, largest=False).indices
        offset = (picked(middle, nearest) - middle[:, :, None]) / self.scale
        neighbour_tokens = picked(F.relu(tokens), nearest)
        features = torch.cat([neighbour_tokens, offset], -1)
        gathered: Tensor = self.second(features).amax(2)
        return tokens + gathered


ENCODERS = {"pointnet_lite": PointNetLite, "pointnet2": PointNet2}
