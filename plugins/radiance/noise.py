"""Random numbers of a step of one network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from runner.api import Batch

    from .config import RadianceGanConfig


def sample_noise(
    config: RadianceGanConfig,
    count: int,
    generator: torch.Generator,
    device: torch.device,
) -> Batch:
    """Samples the random numbers of a step, with a row for each sample of a batch.

    Args:
        config: Settings of the learner.
        count: Samples of the batch.
        generator: Source of the numbers.
        device: Where they are needed.

    Returns:
        ``latent`` [B, 2 * latent], ``scale`` [B] and ``shift`` [B, 2] of patches, and ``depth`` and
        ``density`` [B, R, samples] of rays.
    """

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=generator, device=device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator, device=device)

    # A row for each sample, so that a batch can be cut into parts.
    rays = config.patch**2
    samples = config.samples + config.importance_samples
    # The order is that of the generator's numbers: another one is another training.
    return {
        "latent": spread_latents(config, normal(2 * config.latent)),
        "scale": uniform(),
        "shift": uniform(2),
        "depth": uniform(rays, samples),
        "density": normal(rays, samples),
    }


def spread_latents(config: RadianceGanConfig, normal: torch.Tensor) -> torch.Tensor:
    """Returns latent vectors from numbers with a standard normal distribution."""
    latent: torch.Tensor = config.latent_mean + config.latent_deviation * normal
    return latent
