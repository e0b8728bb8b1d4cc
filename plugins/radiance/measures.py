"""Metrics that compare rendered views with real ones, without a network's weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

LEVELS = 3
"""Levels of the pyramid of the sliced Wasserstein distance."""
PATCH = 7
"""Side of its patches."""
PATCHES = 128
"""Patches of an image."""
DIRECTIONS = 128
"""Random directions on which patches are projected."""
VISIBLE = 0.05
"""Smallest distance from white (1) of the darkest channel of a pixel that shows an object."""
QUARTER = 0.25


def silhouette(image: Tensor) -> Tensor:
    """Returns the pixels [B, H, W] that show an object in front of white.

    Args:
        image: [B, 3, H, W], values from -1 to 1.
    """
    return image.amin(1) < 1 - 2 * VISIBLE


def overlap(left: Tensor, right: Tensor) -> Tensor:
    """Returns the intersection over union [B] of silhouettes; 1 if both images are white.

    Args:
        left: [B, 3, H, W], values from -1 to 1.
        right: The same shape.
    """
    left_pixels = silhouette(left)
    right_pixels = silhouette(right)
    union = (left_pixels | right_pixels).flatten(1).sum(1)
    intersection = (left_pixels & right_pixels).flatten(1).sum(1)
    ones = torch.ones_like(union, dtype=torch.float32)
    return torch.where(union > 0, intersection / union.clamp(min=1), ones)


def sliced_wasserstein(left: Tensor, right: Tensor, seed: int = 0) -> float:
    """Returns the sliced Wasserstein distance of two sets of images, times 1,000.

    Patches of 7 x 7 pixels of a Laplacian pyramid are normalized by channel, projected on random
    directions, sorted and compared. The result is the mean over directions and levels (Karras et
    al. 2018, arXiv 1710.10196).

    Args:
        left: [N, 3, H, W], values from -1 to 1.
        right: The same shape.
        seed: Seed of positions and directions, which are the same for both sets.
    """
    distances = []
    levels = zip(pyramid(left), pyramid(right), strict=True)
    for number, (left_level, right_level) in enumerate(levels):
        generator = torch.Generator().manual_seed(seed + number)
        directions = torch.randn(3 * PATCH**2, DIRECTIONS, generator=generator)
        directions = (directions / directions.norm(dim=0)).to(left.device)
        size = (2, len(left_level), PATCHES)
        corners = torch.randint(left_level.shape[-1] - PATCH + 1, size, generator=generator)

        left_values = (patches(left_level, corners) @ directions).sort(0).values
        right_values = (patches(right_level, corners) @ directions).sort(0).values
        distances.append((left_values - right_values).abs().mean())
    return 1e3 * float(torch.stack(distances).mean())


def pyramid(image: Tensor) -> list[Tensor]:
    """Returns the levels of a Laplacian pyramid, the finest first, each larger than a patch."""
    levels: list[Tensor] = []
    while len(levels) < LEVELS - 1 and min(image.shape[-2:]) >= 2 * PATCH:
        small = avg_pool2d(image, 2)
        size = image.shape[-2:]
        levels.append(image - interpolate(small, size=size, mode="bilinear", align_corners=False))
        image = small
    return [*levels, image]


def patches(image: Tensor, corners: Tensor) -> Tensor:
    """Returns patches [N * P, 3 * 7 * 7], normalized by channel over all patches.

    Args:
        image: [N, 3, H, W].
        corners: Row and column of the first pixel of each patch, [2, N, P].
    """
    windows = image.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    index = torch.arange(len(image))[:, None]
    values = windows[index, :, corners[0], corners[1]].flatten(0, 1)
    mean = values.mean((0, 2, 3), keepdim=True)
    deviation = values.std((0, 2, 3), keepdim=True).clamp(min=1e-8)
    return ((values - mean) / deviation).flatten(1)


def quarter_turned(pose: Tensor, label: Tensor) -> Tensor:
    """Returns the index [N] of the view of the same class nearest to a quarter turn away.

    Args:
        pose: [N, 2], u and v from 0 to 1.
        label: [N].
    """
    azimuth = pose[:, 0]
    angle = torch.remainder(azimuth[:, None] - azimuth[None, :], 1.0)
    angle = torch.minimum(angle, 1 - angle)
    elevation = pose[:, 1]
    height = (elevation[:, None] - elevation[None, :]).abs()
    distance = (angle - QUARTER).abs() + height
    is_other_class = label[:, None] != label[None, :]
    return distance.masked_fill(is_other_class, torch.inf).argmin(1)


def nearest_class(image: Tensor, means: Tensor) -> Tensor:
    """Returns the index [B] of the mean image that is nearest to each image.

    Args:
        image: [B, 3, H, W].
        means: [C, 3, H, W].
    """
    return torch.cdist(image.flatten(1), means.flatten(1)).argmin(1)
