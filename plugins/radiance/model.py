"""Networks of the radiance-field GAN, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from runner.api import Batch, Context, Learner, Mean, UsageError

from .camera import camera_from_angles, pixel_positions, rays
from .measures import psnr
from .networks import PatchDiscriminator, RadianceField, SuperResolution, reduce
from .noise import spread_latents
from .patches import rows_to_patch
from .planes import count_planes
from .ray_batch import RayBatch, rays_of_images
from .rendering import (
    Rendering,
    composite,
    importance_depths,
    lengths,
    stratified_depths,
)
from .served import latents_of, poses_of, responses_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from .config import RadianceGanConfig
    from .served import ViewRequest, ViewResponse

OCTAVES = (6, 4)
"""Octaves of encoded points, and of encoded directions."""
DISCRIMINATOR_WIDTH = 32
SUPER_RESOLUTION_WIDTH = 32
LEAST_SIDE = 8
"""Smallest side of an image, in pixels."""


class RadianceModel(Learner):
    """A generator of views, a discriminator of their patches, and super-resolution.

    Each network is a role with an optimizer.
    """

    config: RadianceGanConfig

    def __init__(
        self,
        config: RadianceGanConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> None:
        super().__init__(config, shapes, context)
        self.side = shapes["image"][1]
        self.small_side = self.side // config.factor
        if self.side % config.factor or self.side < LEAST_SIDE:
            raise UsageError(
                f"data: images are {self.side} pixels wide; make it {LEAST_SIDE} or more, "
                f"and a multiple of model.factor, {config.factor}"
            )
        self.classes = context.sizes["classes"]
        self.class_names = context.classes
        self.lens = context.tables["lens"].to(self.device)
        self.camera_radius = float(context.tables["radius"])

        # The order is that of the numbers with which parameters are initialized.
        discriminator = PatchDiscriminator(
            config.patch,
            count_planes(config.condition, self.classes),
            DISCRIMINATOR_WIDTH,
        )
        generator = RadianceField(
            self.classes,
            config.width,
            config.layers,
            config.latent,
            OCTAVES,
        )
        enlarger = SuperResolution(
            config.sectors,
            self.small_side,
            config.factor,
            SUPER_RESOLUTION_WIDTH,
        )
        self.discriminator = self.role("discriminator", discriminator)
        self.generator = self.role("generator", generator)
        self.super_resolution = self.role("super_resolution", enlarger)

    @property
    def has_free_azimuth(self) -> bool:
        """True if training determines azimuths only up to an offset of each class."""
        return "pose" not in self.config.condition

    # --- slots ------------------------------------------------------------------------

    def render_rays(self, ray_batch: RayBatch) -> Tensor:
        """Returns the colours [B, R, 3] of rays, from 0 to 1, chunk by chunk."""
        chunks = ray_batch.chunks(self.config.ray_chunk)
        colours = [self.slots.render_chunk(*chunk) for chunk in chunks]
        return torch.cat(colours, 1)

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
        near = self.config.near
        far = self.config.far
        first = self.config.samples

        def render_samples(depths: Tensor, noise: Tensor) -> Rendering:
            offset = direction.unsqueeze(2) * depths.unsqueeze(-1)
            points = origin.unsqueeze(2) + offset
            with self.slots.precision():
                density, colour = self.generator.module(
                    points,
                    direction,
                    latent,
                    label,
                    noise,
                )
            # Autocast may have computed in 16 bits, in which compositing is too coarse.
            density = density.to(depths.dtype)
            colour = colour.to(depths.dtype)
            return composite(density, colour, lengths(depths, near, far))

        depths = stratified_depths(near, far, uniform[..., :first])
        if self.config.importance_samples:
            # The first pass only finds where to sample.
            with torch.no_grad():
                rendering = render_samples(depths, density_noise[..., :first])
            depths = importance_depths(
                rendering.weights,
                depths,
                near,
                far,
                uniform[..., first:],
            )
        return render_samples(depths, density_noise).colour

    def image_rays(self, camera: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rays of all pixels of images.

        Args:
            camera: [B, 3, 4].

        Returns:
            Origins [B, 1, 3], and directions [B, H * W, 3] of length 1, row by row.
        """
        positions = pixel_positions(self.side, self.side).to(camera)
        positions = positions.expand(len(camera), -1, -1)
        return rays(camera, positions, self.lens)

    def judge(self, patch: Tensor, condition: Tensor) -> Tensor:
        """Returns the discriminator's logits [B]."""
        with self.slots.precision():
            logit: Tensor = self.discriminator.module(patch, condition)
        return logit.to(patch.dtype)

    def enlarge(self, image: Tensor, azimuth: Tensor) -> Tensor:
        """Returns images [B, 3, h, w] with ``factor`` times the height and width."""
        # Autocast may have computed in 16 bits, and losses need the digits of the image.
        with self.slots.precision():
            large: Tensor = self.super_resolution.module(image, azimuth)
        return large.to(image.dtype)

    # --- answers ----------------------------------------------------------------------

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the radiance field, which is evaluated chunk by chunk."""
        return [self.generator.module]

    def inputs(self, batch: Batch) -> Batch:
        """Returns labels, poses, cameras and latent vectors of a batch.

        Latent vectors are sampled from torch's global generator.
        """
        views = {name: batch[name] for name in ("label", "pose", "camera")}
        # On the CPU, so that every device renders the same objects.
        count = len(batch["label"])
        normal = torch.randn(count, 2 * self.config.latent, device="cpu")
        latent = spread_latents(self.config, normal)
        return {**views, "latent": latent.to(self.device)}

    def predict(self, inputs: Batch) -> Tensor:
        """Renders images [B, 3, side, side] from -1 to 1, without the randomness of training."""
        count = len(inputs["label"])
        images = []
        # A server may request more views than fit into memory.
        for start in range(0, count, self.config.prediction_batch):
            views = slice(start, start + self.config.prediction_batch)
            group = {
                name: inputs[name][views] for name in ("label", "camera", "latent")
            }
            origin, direction = self.slots.image_rays(group["camera"])
            images.append(self._render_images(group, origin, direction, self.side))
        return torch.cat(images)

    def render_small(self, inputs: Batch) -> Tensor:
        """Renders images of the size that super-resolution enlarges."""
        side = self.small_side
        camera = inputs["camera"]
        positions = pixel_positions(side, side).to(camera)
        positions = positions.expand(len(camera), -1, -1)
        origin, direction = rays(camera, positions, self.lens)
        return self._render_images(inputs, origin, direction, side)

    def _render_images(
        self,
        inputs: Batch,
        origin: Tensor,
        direction: Tensor,
        side: int,
    ) -> Tensor:
        ray_batches = rays_of_images(
            inputs,
            origin,
            direction,
            self.config.samples,
            self.config.importance_samples,
        )
        rows = [self.slots.render_rays(ray_batch) for ray_batch in ray_batches]
        colour = torch.cat(rows, 1)
        return rows_to_patch(2 * colour - 1, side)

    def refused(self, request: ViewRequest) -> str | None:
        """Returns why a view cannot be rendered; None if it can."""
        if request.label < self.classes:
            return None
        largest = self.classes - 1
        return f"label: {request.label} exceeds the largest class of this model ({largest})"

    def requested(self, requests: Sequence[ViewRequest]) -> Batch:
        """Returns the inputs of ``predict`` for requested views."""
        label = torch.tensor([request.label for request in requests])
        pose = poses_of(requests).to(self.device)
        latent = latents_of(requests, 2 * self.config.latent)
        return {
            "label": label.to(self.device),
            "camera": camera_from_angles(pose, self.camera_radius),
            "latent": spread_latents(self.config, latent.to(self.device)),
        }

    def answered(
        self, requests: Sequence[ViewRequest], outputs: Tensor
    ) -> Sequence[ViewResponse]:
        """Returns rendered views as responses."""
        # A plan has no names.
        names = self.class_names or [str(number) for number in range(self.classes)]
        return responses_of(outputs, names)

    def shrink(self, image: Tensor) -> Tensor:
        """Returns images of the size that super-resolution enlarges."""
        return reduce(image, self.config.factor)

    def enlargements(
        self,
        small: Tensor,
        azimuth: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns small images [B, 3, h, w], and the same enlarged in two ways.

        The second is bicubic interpolation, and the third is super-resolution.
        """
        bicubic = interpolate(
            small,
            scale_factor=self.config.factor,
            mode="bicubic",
            align_corners=False,
        )
        return small, bicubic, self.slots.enlarge(small, azimuth)

    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns metrics of the super-resolution of real images.

        ``sr_psnr``, ``sr_gain`` over bicubic interpolation, and ``sr_residual``: the root mean
        square of the difference between an enlarged image, reduced again, and its input.
        """
        image = batch["image"]
        azimuth = batch["pose"][:, 0]
        small, bicubic, large = self.enlargements(self.shrink(image), azimuth)
        ratio = psnr(large, image)
        reference = psnr(bicubic, image)
        difference = self.shrink(large) - small
        residual = difference.square().flatten(1).mean(1).sqrt()
        count = len(image)
        return {
            "sr_psnr": Mean(ratio.sum(), count),
            "sr_gain": Mean((ratio - reference).sum(), count),
            "sr_residual": Mean(residual.sum(), count),
        }
