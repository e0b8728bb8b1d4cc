"""Rays of several images that are rendered together."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RayBatch(NamedTuple):
    """R rays of each of B images, with everything that is random in their rendering."""

    origin: Tensor
    """[B, 1, 3]."""
    direction: Tensor
    """[B, R, 3] of length 1."""
    latent: Tensor
    """[B, 2 * latent], of the shape and of the appearance."""
    label: Tensor
    """[B]."""
    uniform: Tensor
    """[B, R, samples + importance samples], 0 to 1: positions of the samples along the rays."""
    density_noise: Tensor
    """The same shape, added to densities before they are made positive."""

    def chunks(self, rays: int) -> list[RayBatch]:
        """Returns the rays in chunks of at most so many rays of all images together.

        Args:
            rays: Limit of a chunk. A chunk has at least one ray of each image.
        """
        rays_per_image = max(1, rays // len(self.label))
        names = ("direction", "uniform", "density_noise")
        columns = [getattr(self, name).split(rays_per_image, 1) for name in names]
        return [self._replace(**dict(zip(names, tables, strict=True))) for tables in zip(*columns, strict=True)]
