"""Square patches of images: their positions and their colours (GRAF, arXiv 2007.02442)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .camera import pixel_positions

LEAST_EXPONENT = 1e-3
"""Smallest second parameter of a beta distribution; the distribution needs a positive one."""
LEAST_COMPLEMENT = 1e-6
"""Smallest number that is raised to a power; of 0 the power has no gradient."""


class Patch(NamedTuple):
    """Position and size of one patch in each of B images."""

    scale: Tensor
    """[B]: the side of the patch, as a share of the image's."""
    centre: Tensor
    """[B, 2], in image positions from -1 to 1."""

    def positions(self, size: int) -> Tensor:
        """Returns the positions [B, size * size, 2] of the pixels of a patch, row by row."""
        grid = pixel_positions(size, size).to(self.scale)
        centre = self.centre[:, None]
        scale = self.scale[:, None, None]
        return centre + scale * grid


def annealed_scale(uniform: Tensor, least: float, fraction: float) -> Tensor:
    """Returns scales [B] between a bound and 1 (GRAF).

    The bound falls linearly from 1 to ``least``, so the first patches are entire images.
    """
    bound = 1 - (1 - least) * fraction
    return bound + (1 - bound) * uniform


def beta_scale(
    uniform: Tensor, least: float, fraction: float, shape: float = 0.8
) -> Tensor:
    """Returns scales [B] between ``least`` and 1 with a beta distribution.

    Its parameters are 1 and a number that grows linearly to ``shape``, so the first patches
    are entire images (EpiGRAF, arXiv 2206.10535, section 3.3).
    """
    exponent = max(LEAST_EXPONENT, shape * fraction)
    complement = (1 - uniform).clamp(min=LEAST_COMPLEMENT)
    # The inverse of the distribution function 1 - (1 - x)^exponent.
    quantile = 1 - complement ** (1 / exponent)
    return least + (1 - least) * quantile


def patch_at(scale: Tensor, uniform: Tensor) -> Patch:
    """Returns patches of scales [B] inside of the image; numbers [B, 2] from 0 to 1 place them."""
    margin = (1 - scale)[:, None]
    centre = margin * (2 * uniform - 1)
    return Patch(scale, centre)


def colours_at(image: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns patches [B, 3, size, size] of images.

    Args:
        image: [B, 3, H, W].
        positions: [B, size * size, 2], from -1 to 1.
        size: Side of a patch, in pixels.
    """
    grid = positions.view(len(image), size, size, 2)
    grid = grid.to(image.dtype)
    # Corners of the outer pixels are at -1 and 1, as those of patches are.
    return F.grid_sample(
        image,
        grid,
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )


def rows_to_patch(colour: Tensor, size: int) -> Tensor:
    """Returns colours [B, size * size, 3] as patches [B, 3, size, size]."""
    channels_first = colour.transpose(1, 2)
    return channels_first.reshape(len(colour), 3, size, size)
