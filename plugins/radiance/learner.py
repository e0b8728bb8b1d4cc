"""Updates and predictions of the radiance-field GAN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, mse_loss, one_hot, softplus

from runner.api import Batch, Context, Learner, Loss, Mean, Progress, UsageError

from .camera import camera_from_angles, pixel_positions, rays
from .networks import PatchDiscriminator, RadianceField, SuperResolution, reduce
from .patches import Patch, annealed_scale, beta_scale, colours_at, patch_at, rows_to_patch
from .ray_batch import RayBatch
from .rendering import Rendering, composite, importance_depths, lengths, stratified_depths
from .served import latents_of, poses_of, responses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from .config import RadianceGanConfig
    from .served import ViewRequest, ViewResponse

OCTAVES = (6, 4)
"""Octaves of encoded points, and of encoded directions."""
DISCRIMINATOR_WIDTH = 32
SUPER_RESOLUTION_WIDTH = 32
NOISY = 0.25
"""Share of the training in which densities are noisy."""
CONSISTENCY_DECAY = 1e-4
"""Rate, in updates, at which the weight of the small image falls in the loss of super-resolution."""
LEAST_SIDE = 8
"""Smallest side of an image, in pixels."""
RAYS_AT_ONCE = 4096
"""Rays of whole images that are rendered together."""


class RadianceGan(Learner):
    """A generator of views, a discriminator of their patches, and super-resolution, each with an optimizer.

    A batch has ``image`` [B, 3, H, W] from -1 to 1, ``label`` [B], ``pose`` [B, 2] (u and v, 0 to 1) and ``camera``
    [B, 3, 4].
    """

    story = ("render", "judge", "enlarge")
    compilable = ("render_chunk", "judge", "enlarge")

    def __init__(self, config: RadianceGanConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> None:
        super().__init__(config, shapes, context)
        self.side = shapes["image"][1]
        if self.side % config.factor or self.side < LEAST_SIDE:
            requirement = f"{LEAST_SIDE} or more, and a multiple of model.factor, {config.factor}"
            raise UsageError(f"data: images are {self.side} pixels wide; make it {requirement}")
        self.classes = context.sizes["classes"]
        self.lens = context.tables["lens"].to(self.device)
        self.camera_radius = float(context.tables["radius"])
        # A pose is the sine and the cosine of the azimuth, and the elevation.
        planes = {"class": self.classes, "pose": 3, "position": 2}
        count = sum(planes[name] for name in config.condition)
        discriminator = PatchDiscriminator(config.patch, count, DISCRIMINATOR_WIDTH)
        generator = RadianceField(self.classes, config.width, config.layers, config.latent, OCTAVES)
        enlarger = SuperResolution(config.sectors, self.side // config.factor, config.factor, SUPER_RESOLUTION_WIDTH)
        self.discriminator = self.role("discriminator", discriminator)
        self.generator = self.role("generator", generator)
        self.super_resolution = self.role("super_resolution", enlarger)

    @property
    def has_free_azimuth(self) -> bool:
        """True if training determines azimuths only up to an offset of each class."""
        return "pose" not in self.config.condition

    # --- training -----------------------------------------------------------------------------------------------------

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns the random numbers of patches and rays, separately for both networks."""
        count = len(batch["label"])
        networks = ("discriminator", "generator")
        return {network: self._sample_noise(count, generator) for network in networks}

    def _sample_noise(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        patch_rays = self.config.patch**2
        samples = self.config.samples + self.config.importance_samples
        return {
            "latent": self.spread(torch.randn(count, 2 * self.config.latent, **options)),
            "scale": torch.rand(count, **options),
            "shift": torch.rand(count, 2, **options),
            "depth": torch.rand(count, patch_rays, samples, **options),
            "density": torch.randn(count, patch_rays, samples, **options),
        }

    def update(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Takes a step of the discriminator, one of the generator, and one of super-resolution."""
        logged = self.slots.discriminator_step(batch, noise["discriminator"], progress)
        logged |= self.slots.generator_step(batch, noise["generator"], progress)
        return {**logged, **self.slots.sr_step(batch, progress)}

    def discriminator_step(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Trains the discriminator to separate real patches from rendered ones."""
        self.discriminator.zero_grad()
        loss: Loss = self.slots.forward_backward(batch, noise, progress, window="discriminator")
        self.discriminator.step()
        return {"d_loss": Mean(loss.sum, loss.count), **loss.also}

    def generator_step(self, batch: Batch, noise: Batch, progress: Progress) -> dict[str, Any]:
        """Trains the generator to render patches that the discriminator takes for real."""
        self.generator.zero_grad()
        with self.discriminator.frozen():
            loss: Loss = self.slots.forward_backward(batch, noise, progress, window="generator")
        self.generator.step()
        return {"g_loss": Mean(loss.sum, loss.count)}

    def sr_step(self, batch: Batch, progress: Progress) -> dict[str, Any]:
        """Trains super-resolution to enlarge real images."""
        self.super_resolution.zero_grad()
        loss: Loss = self.slots.forward_backward(batch, {}, progress, window="super_resolution")
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
        return Loss(loss.sum.detach(), loss.count, loss.also)

    def discriminator_loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the logistic loss of real and rendered patches, with the gradient penalty."""
        patch = self.patch_of(noise, progress.fraction)
        with torch.no_grad():
            fake = self.slots.render(batch, patch, noise, progress.fraction)
        real = colours_at(batch["image"], patch.positions(self.config.patch), self.config.patch)
        condition = self.condition_of(batch, patch)

        real_logit, fake_logit = self.slots.judge_pair(real, fake, condition)
        penalty = self.slots.gradient_penalty(real, condition)
        total = softplus(fake_logit).sum() + softplus(-real_logit).sum()
        count = len(real)
        total = total + self.config.r1 / 2 * count * penalty
        return Loss(total, count, {"r1": Mean(count * penalty.detach(), count)})

    def generator_loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the logistic loss of rendered patches that should be taken for real ones."""
        patch = self.patch_of(noise, progress.fraction)
        fake = self.slots.render(batch, patch, noise, progress.fraction)
        logit = self.slots.judge(fake, self.condition_of(batch, patch))
        return Loss(softplus(-logit).sum(), len(fake))

    def super_resolution_loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the squared error of the large image, and of the small one with a falling weight."""
        image = batch["image"]
        small = reduce(image, self.config.factor)
        with torch.set_grad_enabled(self.config.gradient == "full"):
            large = self.slots.enlarge(small, batch["pose"][:, 0])
        if self.config.gradient == "cut":
            large = large.detach().requires_grad_()
        weight = math.exp(-CONSISTENCY_DECAY * progress.updates)
        error = mse_loss(large, image) + weight * mse_loss(reduce(large, self.config.factor), small)
        return Loss(len(image) * error, len(image))

    def patch_of(self, noise: Batch, fraction: float) -> Patch:
        """Returns the patches that random numbers describe."""
        scales = beta_scale if self.config.patch_scale == "beta" else annealed_scale
        return patch_at(scales(noise["scale"], self.config.least_scale, fraction), noise["shift"])

    def spread(self, normal: Tensor) -> Tensor:
        """Returns latent vectors from numbers with a standard normal distribution."""
        latent: Tensor = self.config.latent_mean + self.config.latent_deviation * normal
        return latent

    def condition_of(self, batch: Batch, patch: Patch) -> Tensor:
        """Returns the discriminator's inputs besides patches, [B, planes, size, size]."""
        size = self.config.patch
        azimuth = 2 * math.pi * batch["pose"][:, 0]
        planes: list[Tensor] = []
        if "class" in self.config.condition:
            planes += one_hot(batch["label"], self.classes).to(azimuth).unbind(1)
        if "pose" in self.config.condition:
            planes += [azimuth.cos(), azimuth.sin(), batch["pose"][:, 1]]
        constant = [plane.view(-1, 1, 1).expand(-1, size, size) for plane in planes]

        varying: list[Tensor] = []
        if "position" in self.config.condition:
            positions = patch.positions(size).view(-1, size, size, 2)
            varying += positions.unbind(-1)
        return torch.stack([*constant, *varying], 1)

    # --- slots --------------------------------------------------------------------------------------------------------

    def render(self, batch: Batch, patch: Patch, noise: Batch, fraction: float) -> Tensor:
        """Renders patches [B, 3, size, size] from -1 to 1, of the labels and from the cameras of a batch."""
        noisiness = self.config.density_noise * max(0.0, 1 - fraction / NOISY)
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
        return rows_to_patch(2 * self.slots.render_rays(ray_batch) - 1, self.config.patch)

    def render_rays(self, ray_batch: RayBatch) -> Tensor:
        """Returns the colours [B, R, 3] of rays, from 0 to 1, chunk by chunk."""
        chunks = ray_batch.chunks(self.config.ray_chunk)
        return torch.cat([self.slots.render_chunk(*chunk) for chunk in chunks], 1)

    def render_chunk(
        self,
        origin: Tensor,
        direction: Tensor,
        latent: Tensor,
        label: Tensor,
        uniform: Tensor,
        density_noise: Tensor,
    ) -> Tensor:
        """Returns the colours [B, R, 3] of the rays of a ``RayBatch``, from 0 to 1."""
        near, far, first = self.config.near, self.config.far, self.config.samples

        def field(depths: Tensor, noise: Tensor) -> Rendering:
            points = origin.unsqueeze(2) + direction.unsqueeze(2) * depths.unsqueeze(-1)
            with self.slots.precision():
                density, colour = self.generator.module(points, direction, latent, label, noise)
            length = lengths(depths, near, far)
            return composite(density.to(depths.dtype), colour.to(depths.dtype), length)

        depths = stratified_depths(near, far, uniform[..., :first])
        if self.config.importance_samples:
            with torch.no_grad():
                weights = field(depths, density_noise[..., :first]).weights
            depths = importance_depths(weights, depths, near, far, uniform[..., first:])
        return field(depths, density_noise).colour

    def image_rays(self, camera: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rays of all pixels of images.

        Args:
            camera: [B, 3, 4].

        Returns:
            Origins [B, 1, 3], and directions [B, H * W, 3] of length 1, row by row.
        """
        positions = pixel_positions(self.side, self.side).to(camera)
        return rays(camera, positions.expand(len(camera), -1, -1), self.lens)

    def judge(self, patch: Tensor, condition: Tensor) -> Tensor:
        """Returns the discriminator's logits [B]."""
        with self.slots.precision():
            logit: Tensor = self.discriminator.module(patch, condition)
        return logit.to(patch.dtype)

    def judge_pair(self, real: Tensor, fake: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the discriminator's logits [B] of real patches, and of rendered ones."""
        fake_logit = self.slots.judge(fake, condition)
        return self.slots.judge(real, condition), fake_logit

    def enlarge(self, image: Tensor, azimuth: Tensor) -> Tensor:
        """Returns images [B, 3, h, w] with ``factor`` times the height and width."""
        with self.slots.precision():
            large: Tensor = self.super_resolution.module(image, azimuth)
        return large.to(image.dtype)

    def gradient_penalty(self, real: Tensor, condition: Tensor) -> Tensor:
        """Returns R1, the mean of |dD/dx|^2 over real patches.

        Mescheder et al. 2018, arXiv 1801.04406, equation 9. It is computed in the precision of
        the parameters, because in bfloat16 its gradient is wrong by some percent.
        """
        real = real.detach().requires_grad_()
        with torch.autocast(real.device.type, enabled=False):
            logit = self.discriminator.module(real, condition)
        (slope,) = torch.autograd.grad(logit.sum(), real, create_graph=True)
        return slope.square().flatten(1).sum(1).mean()

    # --- answers ------------------------------------------------------------------------------------------------------

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the radiance field, which is evaluated chunk by chunk."""
        return [self.generator.module]

    def inputs(self, batch: Batch) -> Batch:
        """Returns labels, poses and cameras of a batch, with latent vectors from torch's global generator."""
        views = {name: batch[name] for name in ("label", "pose", "camera")}
        latent = self.spread(torch.randn(len(batch["label"]), 2 * self.config.latent, device="cpu"))
        return {**views, "latent": latent.to(self.device)}

    def predict(self, inputs: Batch) -> Tensor:
        """Renders images [B, 3, side, side] from -1 to 1, without the randomness of training."""
        count = len(inputs["label"])
        images = []
        for start in range(0, count, self.config.prediction_batch):
            views = slice(start, start + self.config.prediction_batch)
            part = {name: inputs[name][views] for name in ("label", "camera", "latent")}
            origin, directions = self.slots.image_rays(part["camera"])
            images.append(self._render_images(part, origin, directions, self.side))
        return torch.cat(images)

    def render_small(self, inputs: Batch) -> Tensor:
        """Renders images of the size that super-resolution enlarges."""
        side = self.side // self.config.factor
        camera = inputs["camera"]
        positions = pixel_positions(side, side).to(camera).expand(len(camera), -1, -1)
        origin, directions = rays(camera, positions, self.lens)
        return self._render_images(inputs, origin, directions, side)

    def _render_images(self, inputs: Batch, origin: Tensor, directions: Tensor, side: int) -> Tensor:
        count, extra = len(inputs["label"]), self.config.importance_samples
        middle = directions.new_full((self.config.samples,), 0.5)
        # Importance samples divide the distribution along a ray evenly.
        even = (torch.arange(extra, device=self.device, dtype=directions.dtype) + 0.5) / max(extra, 1)
        uniform = torch.cat([middle, even])

        rows = []
        for direction in torch.split(directions, max(1, RAYS_AT_ONCE // count), 1):
            shape = (*direction.shape[:2], len(uniform))
            ray_batch = RayBatch(
                origin=origin,
                direction=direction,
                latent=inputs["latent"],
                label=inputs["label"],
                uniform=uniform.expand(shape),
                density_noise=directions.new_zeros(()).expand(shape),
            )
            rows.append(self.slots.render_rays(ray_batch))
        return rows_to_patch(2 * torch.cat(rows, 1) - 1, side)

    def refused(self, request: ViewRequest) -> str | None:
        """Returns why a view cannot be rendered; None if it can."""
        if request.label < self.classes:
            return None
        return f"label: {request.label} exceeds the largest class of this model ({self.classes - 1})"

    def requested(self, requests: Sequence[ViewRequest]) -> Batch:
        """Returns the inputs of ``predict`` for requested views."""
        pose = poses_of(requests).to(self.device)
        latent = latents_of(requests, 2 * self.config.latent).to(self.device)
        return {
            "label": torch.tensor([request.label for request in requests], device=self.device),
            "camera": camera_from_angles(pose, self.camera_radius),
            "latent": self.spread(latent),
        }

    def answered(self, requests: Sequence[ViewRequest], outputs: Tensor) -> Sequence[ViewResponse]:
        """Returns rendered views as responses."""
        return responses_of(outputs, self.classes)

    def shrink(self, image: Tensor) -> Tensor:
        """Returns images of the size that super-resolution enlarges."""
        return reduce(image, self.config.factor)

    def enlargements(self, small: Tensor, azimuth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns small images [B, 3, h, w], and the same enlarged by bicubic interpolation and super-resolution."""
        bicubic = interpolate(small, scale_factor=self.config.factor, mode="bicubic", align_corners=False)
        return small, bicubic, self.slots.enlarge(small, azimuth)

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns ``sr_psnr``, ``sr_gain`` over bicubic interpolation, and ``sr_residual`` of real images."""
        image = batch["image"]
        small, bicubic, large = self.enlargements(self.shrink(image), batch["pose"][:, 0])
        ratio, reference = psnr(large, image), psnr(bicubic, image)
        residual = (self.shrink(large) - small).square().flatten(1).mean(1).sqrt()
        sums = {"sr_psnr": ratio, "sr_gain": ratio - reference, "sr_residual": residual}
        return {name: Mean(values.sum(), len(image)) for name, values in sums.items()}


def psnr(image: Tensor, reference: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratios [B] in dB of images [B, 3, H, W] from -1 to 1."""
    error = ((image.clamp(-1, 1) - reference) / 2).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp(min=1e-10))
