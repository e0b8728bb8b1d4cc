"""The learner that denoises latent vectors of grasps, in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, Loss, Progress

from .learner import GraspDiffusion, weighted_loss
from .network import NUMBERS, DiffusionNetwork

if TYPE_CHECKING:
    from .config import GraspDiffusionConfig, GraspLatentConfig


class LatentNetwork(DiffusionNetwork):
    """A network that denoises latent vectors, with an autoencoder of single grasps.

    Latent vectors are divided by their root mean square, so that their squares have a mean of one,
    which the noise schedule expects. There are no statistics to estimate, store or exchange.
    """

    def __init__(
        self, config: GraspLatentConfig, tables: Mapping[str, Tensor]
    ) -> None:
        super().__init__(config, tables, config.latent)
        width = 2 * config.width

        def layers(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs)
            )

        self.grasp_encoder = layers(NUMBERS, config.latent)
        self.grasp_decoder = layers(config.latent, NUMBERS)

    def latents(self, grasp: Tensor) -> Tensor:
        """Returns the latent vectors [B, G, latent] of scaled grasps [B, G, 25]."""
        return normalized(self.grasp_encoder(grasp))

    def grasps(self, latent: Tensor) -> Tensor:
        """Returns scaled grasps [B, G, 25] for latent vectors [B, G, latent] of any length."""
        grasp: Tensor = self.grasp_decoder(normalized(latent))
        return grasp


def normalized(vectors: Tensor) -> Tensor:
    """Returns vectors [..., N] divided by their root mean square."""
    return F.rms_norm(vectors, vectors.shape[-1:])


class GraspLatent(GraspDiffusion):
    """Predicts clean latent vectors from noisy ones, and learns the autoencoder of grasps at the
    same time.

    Latent vectors are targets without a gradient, so that the loss of the denoiser does not change
    the autoencoder: with that gradient, latent vectors would become what is easiest to predict
    (REPA-E, Leng et al. 2025, arXiv:2504.10483, cuts it, too). Two phases with a frozen autoencoder
    (Rombach et al. 2022, arXiv:2112.10752) would cut it as well, but leave fewer updates to the
    denoiser. No parameter has gradients of both losses; what they share is the norm by which an
    optimizer with ``max_grad_norm`` clips them together.

    The autoencoder is not part of ``forward``, so that mixed precision does not round grasps.
    """

    module: LatentNetwork
    config: GraspLatentConfig
    sensitive: ClassVar[tuple[str, ...]] = (
        *GraspDiffusion.sensitive,
        "grasp_encoder",
        "grasp_decoder",
    )

    @property
    def numbers(self) -> int:
        """Returns the size of latent vectors."""
        return self.config.latent

    def build(
        self,
        config: GraspDiffusionConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the network for latent vectors."""
        return LatentNetwork(config, context.tables)  # type: ignore[arg-type]

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns the noise of the diffusion; and that of the decoder, [B, G, latent]."""
        noise = super().noise(batch, generator)
        decoder = torch.randn(
            noise["noise"].shape, generator=generator, device=generator.device
        )
        return {**noise, "decoder": decoder}

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the errors of reconstructed grasps, and the squared error of the predicted clean
        latent vectors with the weight of its noise level (``latent``): the mean over each set.
        """
        grasp = self.straightened(batch)
        latent = self.module.latents(grasp)
        noisy = latent + self.config.latent_noise * noise["decoder"]
        errors = self.slots.restoration(self.module.grasps(noisy), grasp)

        clean = latent.detach()
        x0 = self.recovered(clean, batch, noise)
        error = (x0 - clean).square().flatten(1).mean(1)
        weight = self.weight[noise["level"]]
        return weighted_loss(
            {**errors, "latent": weight * error},
            log_variances=self.log_variances(),
            with_samples=self.context.sample_losses,
        )

    def clean(self, batch: Batch) -> Tensor:
        """Returns latent vectors of the grasps of a batch, [B, G, latent], without gradients."""
        return self.module.latents(self.straightened(batch)).detach()

    def decoded(self, x0: Tensor) -> Tensor:
        """Returns the scaled grasps [B, G, 25] of sampled latent vectors [B, G, latent]."""
        return self.module.grasps(x0)
