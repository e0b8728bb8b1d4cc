"""Encodes a cloud of points as a few tokens, each of a neighbourhood (PointNet++, arXiv
1706.02413).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

LEVELS = 3
"""Levels of a feature pyramid."""
COARSER = 4
"""Centres of a level for every centre of the next coarser one."""
GATHERED = 8
"""Tokens that a token of a coarser level gathers."""


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


class Pooling(nn.Module):
    """The step from a level of a pyramid to the next coarser one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width + 3, width), nn.ReLU(), nn.Linear(width, width)
        )

    def forward(self, tokens: Tensor, fine: Tensor, coarse: Tensor) -> Tensor:
        """Returns tokens [B, C, width] of coarse centres [B, C, 3], each the maximum over the
        nearest tokens [B, M, width] at fine centres [B, M, 3].
        """
        count = min(GATHERED, fine.shape[1])
        nearest = distances(coarse, fine).topk(count, largest=False).indices
        offset = picked(fine, nearest) - coarse[:, :, None]
        neighbour_tokens = picked(F.relu(tokens), nearest)
        features = torch.cat([neighbour_tokens, offset], -1)
        pooled: Tensor = self.layers(features).amax(2)
        return pooled


class FeaturePyramid(nn.Module):
    """Encoder in three levels, whose coarse features return to the fine ones.

    On the way up, a level has a quarter of the centres of the one below. On the way down (Lin et
    al. 2017, arXiv:1612.03144), every level adds a lateral connection of its own features to those
    of the coarser level, which are interpolated between the three nearest centres (PointNet++,
    equation 2).

    When it helps: where the parts of an object decide together what is good for one of them.
    When it hurts: small clouds of one shape, such as cubes, which need no context: no gain of
    strict grasps beyond its interval was measured (experiments/grasp_parts). More layers take more
    time.
    """

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.first = PointNetLite(width, scale)
        self.up = nn.ModuleList(Pooling(width) for _ in range(LEVELS - 1))
        self.lateral = nn.ModuleList(
            nn.Linear(width, width) for _ in range(LEVELS)
        )
        self.smooth = nn.ModuleList(
            nn.Linear(width, width) for _ in range(LEVELS - 1)
        )

    def forward(
        self, cloud: Tensor, centre: Tensor, neighbour: Tensor
    ) -> Tensor:
        """Returns tokens like ``PointNetLite``."""
        # Farthest points are found one by one: the first of them are those of a coarser level.
        fine = picked(cloud, centre) / self.scale
        middles = [fine]
        levels: list[Tensor] = [self.first(cloud, centre, neighbour)]
        for pooling in self.up:
            count = max(1, middles[-1].shape[1] // COARSER)
            coarse = middles[-1][:, :count]
            levels.append(pooling(levels[-1], middles[-1], coarse))
            middles.append(coarse)

        tokens: Tensor = self.lateral[-1](levels[-1])
        for level in reversed(range(LEVELS - 1)):
            finer = interpolated(tokens, middles[level + 1], middles[level])
            lateral = self.lateral[level](F.relu(levels[level]))
            tokens = self.smooth[level](F.relu(finer + lateral))
        # The centres' positions reach the tokens directly, as in the other encoders.
        return levels[0] + tokens


def distances(points: Tensor, others: Tensor) -> Tensor:
    """Returns the distances [B, P, Q] of points [B, P, 3] and [B, Q, 3], independent of the
    batch.
    """
    return torch.cdist(
        points, others, compute_mode="donot_use_mm_for_euclid_dist"
    )


def interpolated(tokens: Tensor, coarse: Tensor, fine: Tensor) -> Tensor:
    """Returns tokens [B, M, width] at fine centres [B, M, 3] from those at coarse centres.

    They are means of the three nearest tokens, weighted with the inverse squared distance
    (PointNet++, arXiv:1706.02413, equation 2 with p = 2 and k = 3).

    Args:
        tokens: Tokens of the coarse centres, [B, C, width].
        coarse: Coarse centres, [B, C, 3].
        fine: Fine centres, [B, M, 3].
    """
    with torch.no_grad():
        distance = distances(fine, coarse)
        count = min(3, coarse.shape[1])
        distance, nearest = distance.topk(count, largest=False)
        # A fine centre that is a coarse one has its token alone.
        weight = 1 / distance.square().clamp(min=1e-8)
        weight = weight / weight.sum(-1, keepdim=True)
    weighted: Tensor = (weight[..., None] * picked(tokens, nearest)).sum(2)
    return weighted


ENCODERS: dict[str, Callable[[int, float], nn.Module]] = {
    "pointnet_lite": PointNetLite,
    "pointnet2": PointNet2,
    "pyramid": FeaturePyramid,
}
"""Encoders by the name in a recipe; each is made with a width and a scale in metres."""
