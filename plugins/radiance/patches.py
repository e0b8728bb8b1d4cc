"""Square patches of images: their positions and their colours (GRAF, arXiv 2007.02442)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from .camera import pixel_positions


class Patch(NamedTuple):
    """Position and size of one patch in each of B images."""

    scale: Tensor
    """[B]: the side of the patch, as a share of the image's."""
    centre: Tensor
    """[B, 2], in image positions from -1 to 1."""

    def positions(self, size: int) -> Tensor:
        """Returns the positions [B, size * size, 2] of the pixels of a patch, row by row."""
        grid = pixel_positions(size, size).to(self.scale)
        return self.centre[:, None] + self.scale[:, None, None] * grid


def annealed_scale(uniform: Tensor, least: float, fraction: float) -> Tensor:
    """Returns scales [B] between a bound and 1, of which the bound falls linearly from 1 to ``least`` (GRAF)."""
    bound = 1 - (1 - least) * fraction
    return bound + (1 - bound) * uniform


def beta_scale(uniform: Tensor, least: float, fraction: float, shape: float = 0.8) -> Tensor:
    """Returns scales [B] between ``least`` and 1 with a beta distribution (EpiGRAF, arXiv 2206.10535, section 3.3).

    Its parameters are 1 and a number that grows linearly to ``shape``: patches begin with the whole image.
    """
    exponent = max(1e-3, shape * fraction)
    return least + (1 - least) * (1 - (1 - uniform).clamp(min=1e-6) ** (1 / exponent))


def patch_at(scale: Tensor, uniform: Tensor) -> Patch:
    """Returns patches of scales [B] inside of the image; numbers [B, 2] from 0 to 1 place them."""
    return Patch(scale, (1 - scale)[:, None] * (2 * uniform - 1))


def colours_at(image: Tensor, positions: Tensor, size: int) -> Tensor:
    """Returns patches [B, 3, size, size] of images [B, 3, H, W] at positions [B, size * size, 2]."""
    grid = positions.view(len(image), size, size, 2).to(image.dtype)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)


def rows_to_patch(colour: Tensor, size: int) -> Tensor:
    """Returns colours [B, size * size, 3] as patches [B, 3, size, size]."""
    return colour.transpose(1, 2).reshape(len(colour), 3, size, size)
