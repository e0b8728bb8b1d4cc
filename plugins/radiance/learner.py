"""Updates of the radiance-field GAN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, softplus

from runner.api import Batch, Loss, Mean, Progress

from .camera import rays
from .model import RadianceModel
from .noise import sample_noise
from .patches import (
    Patch,
    annealed_scale,
    beta_scale,
    colours_at,
    patch_at,
    rows_to_patch,
)
from .planes import condition_planes
from .ray_batch import RayBatch

if TYPE_CHECKING:
    from collections.abc import Callable

NOISY = 0.25
"""Share of the training in which densities are noisy."""
CONSISTENCY_DECAY = 1e-4
"""Rate, in updates, at which small images lose weight in the loss of super-resolution."""


class RadianceGan(RadianceModel):
    """Trains the discriminator, the generator and super-resolution, one after the other.

    A batch has ``image`` [B, 3, H, W] from -1 to 1, ``label`` [B], ``pose`` [B, 2] (u and v, 0 to
    1) and ``camera`` [B, 3, 4].
    """

    story = ("render", "judge", "enlarge")
    compilable = ("render_chunk", "judge", "enlarge")

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns the random numbers of patches and rays, separately for both networks."""
        count = len(batch["label"])
        networks = ("discriminator", "generator")
        return {
            network: sample_noise(self.config, count, generator, self.device)
            for network in networks
        }

    def update(
        self,
        batch: Batch,
        noise: Batch,
        progress: Progress,
    ) -> dict[str, Any]:
        """Takes a step of the discriminator, one of the generator, and one of super-resolution."""
        logged = self.slots.discriminator_step(batch, noise["discriminator"], progress)
        logged |= self.slots.generator_step(batch, noise["generator"], progress)
        return {**logged, **self.slots.sr_step(batch, progress)}

    def discriminator_step(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> dict[str, Any]:
        """Trains the discriminator to separate real patches from rendered ones."""
        self.discriminator.zero_grad()
        loss: Loss = self.slots.forward_backward(
            batch,
            noise,
            progress,
            window="discriminator",
        )
        self.discriminator.step()
        return {"d_loss": Mean(loss.sum, loss.count), **loss.also}

    def generator_step(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> dict[str, Any]:
        """Trains the generator to render patches that the discriminator takes for real."""
        self.generator.zero_grad()
        # The loss also has a gradient for the discriminator, which is not needed.
        with self.discriminator.frozen():
            loss: Loss = self.slots.forward_backward(
                batch,
                noise,
                progress,
                window="generator",
            )
        self.generator.step()
        return {"g_loss": Mean(loss.sum, loss.count)}

    def sr_step(self, batch: Batch, progress: Progress) -> dict[str, Any]:
        """Trains super-resolution to enlarge real images."""
        self.super_resolution.zero_grad()
        loss: Loss = self.slots.forward_backward(
            batch,
            {},
            progress,
            window="super_resolution",
        )
        self.super_resolution.step()
        return {"sr_loss": Mean(loss.sum, loss.count)}

    def forward_backward(
        self,
        batch: Batch,
        noise: Batch,
        progress: Progress,
        denominator: Callable[[Any], Any] | None = None,
        *,
        window: str,
    ) -> Loss:
        """Adds the gradient of one network's loss to that of its parameters.

        Args:
            batch: A batch, or the part of one.
            noise: Random numbers of that network's step, with the same rows.
            progress: Current progress of the training.
            denominator: Returns the divisor of the sum from its count; the count itself if None.
            window: Network of the gradient: ``discriminator``, ``generator`` or
                ``super_resolution``.

        Returns:
            The loss, detached.
        """
        losses = {
            "discriminator": self.discriminator_loss,
            "generator": self.generator_loss,
            "super_resolution": self.super_resolution_loss,
        }
        loss = losses[window](batch, noise, progress)
        divisor = loss.count if denominator is None else denominator(loss.count)
        self.slots.backward(loss.sum / divisor)
        return loss._replace(sum=loss.sum.detach())

    # --- losses -----------------------------------------------------------------------

    def discriminator_loss(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> Loss:
        """Returns the logistic loss of real and rendered patches, with the gradient penalty."""
        patch = self.patch_of(noise, progress.fraction)
        # The discriminator's loss has no gradient for the generator.
        with torch.no_grad():
            fake = self.slots.render(batch, patch, noise, progress.fraction)
        size = self.config.patch
        # Real patches have the positions of the rendered ones, which must not distinguish them.
        real = colours_at(batch["image"], patch.positions(size), size)
        condition = self.condition_of(batch, patch)

        real_logit, fake_logit = self.slots.judge_pair(real, fake, condition)
        penalty = self.slots.gradient_penalty(real, condition)
        total = softplus(fake_logit).sum() + softplus(-real_logit).sum()
        count = len(real)
        total = total + self.config.r1 / 2 * count * penalty
        logged_penalty = Mean(count * penalty.detach(), count)
        return Loss(total, count, {"r1": logged_penalty})

    def generator_loss(
        self,
        batch: Batch,
        noise: Batch,
        progress: Progress,
    ) -> Loss:
        """Returns the logistic loss of rendered patches that should be taken for real ones."""
        patch = self.patch_of(noise, progress.fraction)
        fake = self.slots.render(batch, patch, noise, progress.fraction)
        condition = self.condition_of(batch, patch)
        logit = self.slots.judge(fake, condition)
        return Loss(softplus(-logit).sum(), len(fake))

    def super_resolution_loss(
        self, batch: Batch, noise: Batch, progress: Progress
    ) -> Loss:
        """Returns the squared error of large images, and of small ones with a falling weight."""
        image = batch["image"]
        azimuth = batch["pose"][:, 0]
        small = self.shrink(image)
        with torch.set_grad_enabled(self.config.gradient == "full"):
            large = self.slots.enlarge(small, azimuth)
        # The original's defect: the loss has a gradient, which reaches no parameter.
        if self.config.gradient == "cut":
            large = large.detach().requires_grad_()

        # Updates are counted by the training, so that a resumed one has the same weight.
        weight = math.exp(-CONSISTENCY_DECAY * progress.updates)
        large_error = mse_loss(large, image)
        small_error = mse_loss(self.shrink(large), small)
        error = large_error + weight * small_error
        count = len(image)
        return Loss(count * error, count)

    def patch_of(self, noise: Batch, fraction: float) -> Patch:
        """Returns the patches that random numbers describe."""
        distributions = {"annealed": annealed_scale, "beta": beta_scale}
        distribution = distributions[self.config.patch_scale]
        scale = distribution(noise["scale"], self.config.least_scale, fraction)
        return patch_at(scale, noise["shift"])

    def condition_of(self, batch: Batch, patch: Patch) -> Tensor:
        """Returns the discriminator's inputs besides patches, [B, planes, size, size]."""
        return condition_planes(
            self.config.condition,
            batch,
            patch,
            self.config.patch,
            self.classes,
        )

    # --- slots ------------------------------------------------------------------------

    def render(
        self, batch: Batch, patch: Patch, noise: Batch, fraction: float
    ) -> Tensor:
        """Renders patches [B, 3, size, size] from -1 to 1.

        Args:
            batch: ``label`` [B] and ``camera`` [B, 3, 4].
            patch: Where the patches are in their images.
            noise: Random numbers, as ``sample_noise`` returns them.
            fraction: Share of the training that is over.
        """
        remaining = max(0.0, 1 - fraction / NOISY)
        noisiness = self.config.density_noise * remaining
        positions = patch.positions(self.config.patch)
        origin, direction = rays(batch["camera"], positions, self.lens)
        ray_batch = RayBatch(
            origin=origin,
            direction=direction,
            latent=noise["latent"],
            label=batch["label"],
            uniform=noise["depth"],
            density_noise=noisiness * noise["density"],
        )
        colour = self.slots.render_rays(ray_batch)
        return rows_to_patch(2 * colour - 1, self.config.patch)

    def judge_pair(
        self, real: Tensor, fake: Tensor, condition: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the discriminator's logits [B] of real patches, and of rendered ones."""
        # The order of the passes decides in which order gradients are added up.
        fake_logit = self.slots.judge(fake, condition)
        return self.slots.judge(real, condition), fake_logit

    def gradient_penalty(self, real: Tensor, condition: Tensor) -> Tensor:
        """Returns R1, the mean of |dD/dx|^2 over real patches.

        Mescheder et al. 2018, arXiv 1801.04406, equation 9. It is computed in the precision of
        the parameters, because in bfloat16 its gradient is wrong by some percent.
        """
        real = real.detach().requires_grad_()
        # Inside of this pass, because leaving autocast later does not change recorded operations.
        with torch.autocast(real.device.type, enabled=False):
            logit = self.discriminator.module(real, condition)
        (slope,) = torch.autograd.grad(logit.sum(), real, create_graph=True)
        return slope.square().flatten(1).sum(1).mean()
