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
LEAST_ERROR = 1e-10
"""Smallest mean squared error; equal images have a ratio of 100 dB."""
LEAST_DEVIATION = 1e-8
"""Smallest standard deviation by which a channel is divided."""
QUARTER = 0.25


def silhouette(image: Tensor) -> Tensor:
    """Returns the pixels [B, H, W] that show an object in front of white.

    Args:
        image: [B, 3, H, W], values from -1 to 1.
    """
    # A saturated colour has a white channel; only the background is white in all three.
    return image.amin(1) < 1 - 2 * VISIBLE


def psnr(image: Tensor, reference: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratios [B] in dB of images from -1 to 1.

    Args:
        image: [B, 3, H, W]. Values beyond the range count as its ends.
        reference: The same shape.
    """
    # Divided by the range of values, so that the peak is 1.
    difference = (image.clamp(-1, 1) - reference) / 2
    error = difference.square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp(min=LEAST_ERROR))


def overlap(left: Tensor, right: Tensor) -> Tensor:
    """Returns the intersection over union [B] of silhouettes; 1 if both images are white.

    Args:
        left: [B, 3, H, W], values from -1 to 1.
        right: The same shape.
    """
    left_pixels = silhouette(left)
    right_pixels = silhouette(right)
    either = left_pixels | right_pixels
    shared = left_pixels & right_pixels
    union = either.flatten(1).sum(1)
    intersection = shared.flatten(1).sum(1)

    share = intersection / union.clamp(min=1)
    ones = torch.ones_like(share)
    return torch.where(union > 0, share, ones)


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
    # Different seeds, so that the levels do not share positions.
    for number, (left_level, right_level) in enumerate(levels):
        generator = torch.Generator().manual_seed(seed + number)
        directions = torch.randn(3 * PATCH**2, DIRECTIONS, generator=generator)
        directions = directions / directions.norm(dim=0)
        directions = directions.to(left.device)
        size = (2, len(left_level), PATCHES)
        last = left_level.shape[-1] - PATCH
        corners = torch.randint(last + 1, size, generator=generator)

        left_values = patches(left_level, corners) @ directions
        right_values = patches(right_level, corners) @ directions
        # In one dimension, the optimal transport maps the n-th smallest value to the n-th smallest.
        gaps = left_values.sort(0).values - right_values.sort(0).values
        distances.append(gaps.abs().mean())
    return 1e3 * float(torch.stack(distances).mean())


def pyramid(image: Tensor) -> list[Tensor]:
    """Returns the levels of a Laplacian pyramid, the finest first, each larger than a patch."""
    levels: list[Tensor] = []
    # A level has at least the size of a patch.
    while len(levels) < LEVELS - 1 and min(image.shape[-2:]) >= 2 * PATCH:
        small = avg_pool2d(image, 2)
        smooth = interpolate(
            small,
            size=image.shape[-2:],
            mode="bilinear",
            align_corners=False,
        )
        levels.append(image - smooth)
        image = small
    return [*levels, image]


def patches(image: Tensor, corners: Tensor) -> Tensor:
    """Returns patches [N * P, 3 * 7 * 7], normalized by channel over all patches.

    Args:
        image: [N, 3, H, W].
        corners: Row and column of the first pixel of each patch, [2, N, P].
    """
    rows, columns = corners
    windows = image.unfold(2, PATCH, 1).unfold(3, PATCH, 1)
    index = torch.arange(len(image))[:, None]
    values = windows[index, :, rows, columns].flatten(0, 1)

    mean = values.mean((0, 2, 3), keepdim=True)
    deviation = values.std((0, 2, 3), keepdim=True)
    # Images of one colour have no deviation.
    normalized = (values - mean) / deviation.clamp(min=LEAST_DEVIATION)
    return normalized.flatten(1)


def quarter_turned(pose: Tensor, label: Tensor) -> Tensor:
    """Returns the index [N] of the view of the same class nearest to a quarter turn away.

    Args:
        pose: [N, 2], u and v from 0 to 1.
        label: [N].
    """
    azimuth, elevation = pose.unbind(1)
    rotation = torch.remainder(azimuth[:, None] - azimuth[None, :], 1.0)
    # The shorter of the two directions of rotation.
    angle = torch.minimum(rotation, 1 - rotation)
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
    distance = torch.cdist(image.flatten(1), means.flatten(1))
    return distance.argmin(1)
