"""What rendered views are worth beside real ones, by measures that need no network's weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

LEVELS, PATCH, PATCHES, DIRECTIONS = 3, 7, 128, 128
"""Of the sliced Wasserstein distance: levels of the pyramid, side of patches, patches of an image, directions."""
VISIBLE = 0.05
"""How far from white (1) the darkest channel of a pixel is that shows an object."""


def silhouette(image: Tensor) -> Tensor:
    """Which pixels [B, H, W] of images [B, 3, H, W] from -1 to 1 show something before a white background."""
    return image.amin(1) < 1 - 2 * VISIBLE


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union [B] of the silhouettes of images; 1 where neither shows anything."""
    first, second = silhouette(one), silhouette(other)
    union = (first | second).flatten(1).sum(1)
    shared = (first & second).flatten(1).sum(1)
    return torch.where(union > 0, shared / union.clamp(min=1), torch.ones_like(union, dtype=torch.float32))


def sliced_wasserstein(one: Tensor, other: Tensor, seed: int = 0) -> float:
    """The sliced Wasserstein distance of two sets of images, times 1,000 (Karras et al. 2018, arXiv 1710.10196).

    Patches of 7 x 7 pixels of a Laplacian pyramid, normalised by channel, are projected on random directions, sorted
    and compared; the mean over directions and levels.

    Args:
        one: [N, 3, H, W], values from -1 to 1.
        other: The same shape.
        seed: Of places and directions, the same for both sets.
    """
    distances = []
    for level, (first, second) in enumerate(zip(pyramid(one), pyramid(other), strict=True)):
        generator = torch.Generator().manual_seed(seed + level)
        directions = torch.randn(3 * PATCH**2, DIRECTIONS, generator=generator)
        directions = (directions / directions.norm(dim=0)).to(one.device)
        places = torch.randint(first.shape[-1] - PATCH + 1, (2, len(first), PATCHES), generator=generator)
        projected = [(patches(each, places) @ directions).sort(0).values for each in (first, second)]
        distances.append((projected[0] - projected[1]).abs().mean())
    return 1e3 * float(torch.stack(distances).mean())


def pyramid(image: Tensor) -> list[Tensor]:
    """The levels of a Laplacian pyramid, the finest first; the last is what remains. All have room for a patch."""
    levels: list[Tensor] = []
    while len(levels) < LEVELS - 1 and min(image.shape[-2:]) >= 2 * PATCH:
        small = avg_pool2d(image, 2)
        levels.append(image - interpolate(small, size=image.shape[-2:], mode="bilinear", align_corners=False))
        image = small
    return [*levels, image]


def patches(image: Tensor, places: Tensor) -> Tensor:
    """Patches [N * P, 3 * 7 * 7] of images [N, 3, H, W] at places [2, N, P], normalised by channel over all."""
    windows = image.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    index = torch.arange(len(image))[:, None]
    taken = windows[index, :, places[0], places[1]].flatten(0, 1)
    mean = taken.mean((0, 2, 3), keepdim=True)
    deviation = taken.std((0, 2, 3), keepdim=True).clamp(min=1e-8)
    return ((taken - mean) / deviation).flatten(1)


def quarter_turned(pose: Tensor, label: Tensor) -> Tensor:
    """For each of N views, the number of the view of the same class that is nearest to a quarter turn away.

    Args:
        pose: [N, 2], u and v from 0 to 1.
        label: [N].
    """
    turn = torch.remainder(pose[:, None, 0] - pose[None, :, 0], 1.0)
    turn = torch.minimum(turn, 1 - turn)
    distance = (turn - 0.25).abs() + (pose[:, None, 1] - pose[None, :, 1]).abs()
    return distance.masked_fill(label[:, None] != label[None, :], torch.inf).argmin(1)


def nearest_class(image: Tensor, means: Tensor) -> Tensor:
    """The number [B] of the mean image [C, 3, H, W] that is nearest to each image [B, 3, H, W]."""
    return torch.cdist(image.flatten(1), means.flatten(1)).argmin(1)
