"""Rays of several images that are rendered together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

RAYS_AT_ONCE = 4096
"""Rays of entire images that are rendered together."""


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
        """Returns the rays in chunks of a limited number of rays of all images together.

        Args:
            rays: Limit of a chunk. A chunk has at least one ray of each image.
        """
        rays_per_image = max(1, rays // len(self.label))
        columns = zip(
            torch.split(self.direction, rays_per_image, 1),
            torch.split(self.uniform, rays_per_image, 1),
            torch.split(self.density_noise, rays_per_image, 1),
            strict=True,
        )
        return [
            self._replace(
                direction=direction,
                uniform=uniform,
                density_noise=density_noise,
            )
            for direction, uniform, density_noise in columns
        ]


def rays_of_images(
    inputs: Mapping[str, Tensor],
    origin: Tensor,
    direction: Tensor,
    samples: int,
    importance_samples: int,
) -> Iterator[RayBatch]:
    """Yields the rays of entire images, without the randomness of training.

    Args:
        inputs: ``latent`` [B, 2 * latent] and ``label`` [B].
        origin: [B, 1, 3].
        direction: [B, H * W, 3] of length 1.
        samples: Samples along each ray.
        importance_samples: More samples where the first ones have a density.
    """
    middle = direction.new_full((samples,), 0.5)
    # Importance samples divide the distribution along a ray evenly.
    rank = torch.arange(
        importance_samples,
        device=direction.device,
        dtype=direction.dtype,
    )
    quantile = (rank + 0.5) / max(importance_samples, 1)
    uniform = torch.cat([middle, quantile])
    # Expanded, because zeros for each sample would take as much memory as the densities.
    no_noise = direction.new_zeros(())

    rays_per_image = max(1, RAYS_AT_ONCE // len(origin))
    for piece in torch.split(direction, rays_per_image, 1):
        shape = (*piece.shape[:2], len(uniform))
        yield RayBatch(
            origin=origin,
            direction=piece,
            latent=inputs["latent"],
            label=inputs["label"],
            uniform=uniform.expand(shape),
            density_noise=no_noise.expand(shape),
        )
