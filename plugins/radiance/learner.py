"""The radiance-field GAN: what its updates do, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, mse_loss, one_hot, softplus

from runner.api import Batch, Context, Learner, Mean, Progress, UsageError

from .camera import pixel_positions, rays
from .networks import PatchDiscriminator, RadianceField, SuperResolution, reduce
from .patches import Patch, annealed_scale, beta_scale, colours_at, patch_at, rows_to_patch
from .rendering import Rendering, composite, importance_depths, lengths, stratified_depths

if TYPE_CHECKING:
    from .config import RadianceGanConfig

OCTAVES = (6, 4)
"""Of encoded points and of encoded directions."""
DISCRIMINATOR_WIDTH, SUPER_RESOLUTION_WIDTH = 32, 32
NOISY = 0.25
"""Share of the training in which densities are noisy."""
CONSISTENCY_DECAY = 1e-4
"""How fast super-resolution's weight on the small image falls, by update."""
LEAST_SIDE = 8
"""Pixels of an image's side."""
RAYS_AT_ONCE = 4096
"""Rays of whole images that are rendered together."""


class RadianceGan(Learner):
    """A generator of views, a discriminator of their patches, and super-resolution, each with an optimizer.

    A batch has ``image`` [B, 3, H, W] from -1 to 1, ``label`` [B], ``pose`` [B, 2] (u and v, 0 to 1) and ``camera``
    [B, 3, 4].
    """

    story = ("render", "judge", "enlarge")

    def __init__(self, config: RadianceGanConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        super().__init__(config, shapes, context)
        self.side = shapes["image"][1]
        if self.side % config.factor or self.side < LEAST_SIDE:
            wanted = f"{LEAST_SIDE} or more, and a multiple of model.factor, {config.factor}"
            raise UsageError(f"data: images are {self.side} pixels wide; make it {wanted}")
        self.classes = context.sizes["classes"]
        self.lens = context.tables["lens"].to(self.device)
        # Class, azimuth as sine and cosine, and elevation; place and scale of the patch where they vary with a purpose.
        planes = self.classes + 3 + (3 if config.patch_scale == "beta" else 0)
        discriminator = PatchDiscriminator(config.patch, planes, DISCRIMINATOR_WIDTH)
        generator = RadianceField(self.classes, config.width, config.layers, config.latent, OCTAVES)
        enlarger = SuperResolution(config.sectors, self.side // config.factor, config.factor, SUPER_RESOLUTION_WIDTH)
        self.discriminator = self.role("discriminator", discriminator)
        self.generator = self.role("generator", generator)
        self.super_resolution = self.role("super_resolution", enlarger)

    # --- training -----------------------------------------------------------------------------------------------------

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """What patches and rays are drawn from, once for the discriminator's and once for the generator's turn."""
        return {turn: self._turn_noise(len(batch["label"]), generator) for turn in ("discriminator", "generator")}

    def _turn_noise(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        patch_rays = self.config.patch**2
        samples = self.config.samples + self.config.importance_samples
        return {
            "latent": torch.randn(count, 2 * self.config.latent, **options),
            "scale": torch.rand(count, **options),
            "shift": torch.rand(count, 2, **options),
            "depth": torch.rand(count, patch_rays, samples, **options),
            "density": torch.randn(count, patch_rays, samples, **options),
        }

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """A step of the discriminator, one of the generator, and one of super-resolution."""
        logged = self.slots.discriminator_step(batch, noise["discriminator"], progress.fraction)
        logged |= self.slots.generator_step(batch, noise["generator"], progress.fraction)
        return {**logged, **self.slots.sr_step(batch, progress.updates)}

    def discriminator_step(self, batch: Batch, noise: Batch, fraction: float) -> dict[str, Tensor]:
        """Learns to tell real patches from rendered ones."""
        patch = self.patch_of(noise, fraction)
        with torch.no_grad():
            fake = self.slots.render(batch, patch, noise, fraction)
        real = colours_at(batch["image"], patch.positions(self.config.patch), self.config.patch)
        known = self.known_of(batch, patch)
        loss = softplus(self.slots.judge(fake, known)).mean() + softplus(-self.slots.judge(real, known)).mean()
        penalty = self.slots.gradient_penalty(real, known)
        self.discriminator.zero_grad()
        self.slots.backward(loss + self.config.r1 / 2 * penalty)
        self.discriminator.step()
        return {"d_loss": loss.detach(), "r1": penalty.detach()}

    def generator_step(self, batch: Batch, noise: Batch, fraction: float) -> dict[str, Tensor]:
        """Learns to render what the discriminator takes for real."""
        patch = self.patch_of(noise, fraction)
        self.generator.zero_grad()
        with self.discriminator.frozen():
            fake = self.slots.render(batch, patch, noise, fraction)
            loss = softplus(-self.slots.judge(fake, self.known_of(batch, patch))).mean()
            self.slots.backward(loss)
        self.generator.step()
        return {"g_loss": loss.detach()}

    def sr_step(self, batch: Batch, updates: int) -> dict[str, Tensor]:
        """Learns to enlarge real images; the small image counts less and less beside the large one."""
        image = batch["image"]
        small = reduce(image, self.config.factor)
        with torch.set_grad_enabled(self.config.gradient == "full"):
            large = self.slots.enlarge(small, batch["pose"][:, 0])
        if self.config.gradient == "cut":
            large = large.detach().requires_grad_()
        weight = math.exp(-CONSISTENCY_DECAY * updates)
        loss = mse_loss(large, image) + weight * mse_loss(reduce(large, self.config.factor), small)
        self.super_resolution.zero_grad()
        self.slots.backward(loss)
        self.super_resolution.step()
        return {"sr_loss": loss.detach()}

    def patch_of(self, noise: Batch, fraction: float) -> Patch:
        """Returns where the patches of a turn lie."""
        scales = beta_scale if self.config.patch_scale == "beta" else annealed_scale
        return patch_at(scales(noise["scale"], self.config.least_scale, fraction), noise["shift"])

    def known_of(self, batch: Batch, patch: Patch) -> Tensor:
        """Returns what the discriminator is told of a patch, [B, planes]."""
        azimuth = 2 * math.pi * batch["pose"][:, :1]
        label = one_hot(batch["label"], self.classes).to(azimuth.dtype)
        parts = [label, azimuth.cos(), azimuth.sin(), batch["pose"][:, 1:]]
        if self.config.patch_scale == "beta":
            parts += [patch.scale[:, None], patch.centre]
        return torch.cat(parts, 1)

    # --- slots --------------------------------------------------------------------------------------------------------

    def render(self, batch: Batch, patch: Patch, noise: Batch, fraction: float) -> Tensor:
        """Renders patches [B, 3, size, size] from -1 to 1, of the labels and from the cameras of a batch."""
        noisiness = self.config.density_noise * max(0.0, 1 - fraction / NOISY)
        positions = patch.positions(self.config.patch)
        rendering = self.rendered(batch, noise["latent"], positions, noise["depth"], noisiness * noise["density"])
        return rows_to_patch(2 * rendering.colour - 1, self.config.patch)

    def judge(self, patch: Tensor, known: Tensor) -> Tensor:
        """The discriminator's logits [B]."""
        with self.slots.precision():
            logit: Tensor = self.discriminator.module(patch, known)
        return logit.to(patch.dtype)

    def enlarge(self, image: Tensor, azimuth: Tensor) -> Tensor:
        """Images [B, 3, h, w] with ``factor`` times the height and width."""
        with self.slots.precision():
            large: Tensor = self.super_resolution.module(image, azimuth)
        return large.to(image.dtype)

    def gradient_penalty(self, real: Tensor, known: Tensor) -> Tensor:
        """R1 (Mescheder et al. 2018, arXiv 1801.04406, equation 9): the mean of |dD/dx|^2 over real patches.

        In the parameters' own precision: in bfloat16, its gradient is some percent off.
        """
        real = real.detach().requires_grad_()
        with torch.autocast(real.device.type, enabled=False):
            logit = self.discriminator.module(real, known)
        (slope,) = torch.autograd.grad(logit.sum(), real, create_graph=True)
        return slope.square().flatten(1).sum(1).mean()

    # --- answers ------------------------------------------------------------------------------------------------------

    def rendered(
        self, batch: Batch, latent: Tensor, positions: Tensor, uniform: Tensor, density_noise: Tensor
    ) -> Rendering:
        """Renders rays.

        Args:
            batch: With ``label`` [B] and ``camera`` [B, 3, 4].
            latent: [B, 2 * latent].
            positions: [B, R, 2], of the rays in the images.
            uniform: [B, R, samples + importance samples], 0 to 1: where along the rays.
            density_noise: The same shape, added to densities before they are made positive.
        """
        near, far, first = self.config.near, self.config.far, self.config.samples
        origin, direction = rays(batch["camera"], positions, self.lens)

        def field(depths: Tensor, noise: Tensor) -> Rendering:
            points = origin.unsqueeze(2) + direction.unsqueeze(2) * depths.unsqueeze(-1)
            with self.slots.precision():
                density, colour = self.generator.module(points, direction, latent, batch["label"], noise)
            return composite(density.to(depths.dtype), colour.to(depths.dtype), lengths(depths, near, far))

        depths = stratified_depths(near, far, uniform[..., :first])
        if self.config.importance_samples:
            with torch.no_grad():
                weights = field(depths, density_noise[..., :first]).weights
            depths = importance_depths(weights, depths, near, far, uniform[..., first:])
        return field(depths, density_noise)

    def inputs(self, batch: Batch) -> Batch:
        """Labels, poses and cameras of a batch, and latent vectors that follow from torch's global generator."""
        asked = {name: batch[name] for name in ("label", "pose", "camera")}
        latent = torch.randn(len(batch["label"]), 2 * self.config.latent, device="cpu")
        return {**asked, "latent": latent.to(self.device)}

    def predict(self, inputs: Batch) -> Tensor:
        """Renders whole images [B, 3, H, W] from -1 to 1, without what is random in a training."""
        positions = pixel_positions(self.side, self.side).to(self.device, inputs["latent"].dtype)
        count, samples = len(inputs["label"]), self.config.samples + self.config.importance_samples
        rows = []
        for part in torch.split(positions, max(1, RAYS_AT_ONCE // count)):
            middle = torch.full((count, len(part), samples), 0.5, device=self.device, dtype=positions.dtype)
            if self.config.importance_samples:
                even = (torch.arange(self.config.importance_samples, device=self.device) + 0.5) / (
                    self.config.importance_samples
                )
                middle[..., self.config.samples :] = even
            shared = part.expand(count, -1, -1)
            rows.append(self.rendered(inputs, inputs["latent"], shared, middle, torch.zeros_like(middle)).colour)
        return rows_to_patch(2 * torch.cat(rows, 1) - 1, self.side)

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """How well real images are enlarged: ``sr_psnr``, ``sr_gain`` over bicubic interpolation, ``sr_residual``."""
        image, factor = batch["image"], self.config.factor
        small = reduce(image, factor)
        large = self.slots.enlarge(small, batch["pose"][:, 0])
        bicubic = interpolate(small, scale_factor=factor, mode="bicubic", align_corners=False)
        ratio, reference = psnr(large, image), psnr(bicubic, image)
        residual = (reduce(large, factor) - small).square().flatten(1).mean(1).sqrt()
        sums = {"sr_psnr": ratio, "sr_gain": ratio - reference, "sr_residual": residual}
        return {name: Mean(values.sum(), len(image)) for name, values in sums.items()}


def psnr(image: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratios [B] in dB of images [B, 3, H, W] from -1 to 1."""
    error = ((image.clamp(-1, 1) - reference) / 2).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp(min=1e-10))
