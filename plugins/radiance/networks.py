"""The networks: a conditional radiance field, a discriminator of patches, and super-resolution."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)


def encode(x: Tensor, octaves: int) -> Tensor:
    """Returns x [..., D] with its sines and cosines, [..., D (1 + 2 octaves)].

    The frequency doubles with every octave.
    """
    # In float32 also inside of autocast: in bfloat16 the highest octaves are noise.
    with torch.autocast(x.device.type, enabled=False):
        octave = torch.arange(octaves, device=x.device, dtype=x.dtype)
        frequency = math.pi * 2.0**octave
        phase = (x.unsqueeze(-1) * frequency).flatten(-2)
        return torch.cat([x, phase.sin(), phase.cos()], -1)


class Condition(nn.Module):
    """Latent vector, scaled by the normalized embedding of the class."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, latent: Tensor, label: Tensor) -> Tensor:
        """Returns [B, size] from latents [B, size] and labels [B]."""
        embedding = self.embedding(label)
        scale: Tensor = self.norm(embedding)
        return latent * scale


class RadianceField(nn.Module):
    """Density and colour at points, from latent vectors of a shape and of an appearance.

    GRAF, arXiv 2007.02442.

    Args:
        classes: Number of classes.
        width: Of the layers.
        layers: Number of layers up to the density.
        latent: Size of each of the two latent vectors.
        octaves: Octaves of encoded points, and of encoded directions.
    """

    def __init__(
        self,
        classes: int,
        width: int,
        layers: int,
        latent: int,
        octaves: tuple[int, int],
    ) -> None:
        super().__init__()
        self.octaves = octaves
        self.shape_condition = Condition(classes, latent)
        self.colour_condition = Condition(classes, latent)
        point = 3 * (1 + 2 * octaves[0])
        view = 3 * (1 + 2 * octaves[1])

        # The block in the middle also receives the inputs of the first one.
        self.skip = layers // 2
        first = point + latent
        sizes = [first] + [width] * (layers - 1)
        if self.skip:
            sizes[self.skip] += first
        self.blocks = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.density = nn.Linear(width, 1)
        self.colour = nn.Sequential(
            nn.Linear(width + view + latent, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, 3),
        )

    def forward(
        self,
        points: Tensor,
        direction: Tensor,
        latent: Tensor,
        label: Tensor,
        density_noise: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns density and colour along rays.

        Args:
            points: [B, R, S, 3].
            direction: [B, R, 3] of length 1.
            latent: [B, 2 * latent], of the shape and of the appearance.
            label: [B].
            density_noise: [B, R, S], added before densities are made positive.

        Returns:
            Densities [B, R, S], and colours [B, R, S, 3] from 0 to 1.
        """
        rays, samples = points.shape[1:3]
        shape, appearance = latent.chunk(2, -1)
        shape = self.shape_condition(shape, label)
        shape = shape[:, None, None].expand(-1, rays, samples, -1)
        appearance = self.colour_condition(appearance, label)
        appearance = appearance[:, None, None].expand(-1, rays, samples, -1)
        view = encode(direction, self.octaves[1])
        view = view[:, :, None].expand(-1, -1, samples, -1)

        encoded_points = encode(points, self.octaves[0])
        inputs = torch.cat([encoded_points, shape], -1)
        hidden = inputs
        for number, block in enumerate(self.blocks):
            if number == self.skip and number:
                hidden = torch.cat([hidden, inputs], -1)
            hidden = F.relu(block(hidden))

        raw_density = self.density(hidden).squeeze(-1)
        density = F.relu(raw_density + density_noise)
        # Only the colour depends on the direction: the shape is the same from everywhere.
        features = torch.cat([hidden, view, appearance], -1)
        raw_colour = self.colour(features)
        return density, torch.sigmoid(raw_colour)


class PatchDiscriminator(nn.Module):
    """Maps patches and planes with their conditions to logits."""

    def __init__(
        self,
        size: int,
        planes: int,
        width: int,
    ) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3 + planes, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.InstanceNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, size // 4),
        )

    def forward(self, patch: Tensor, planes: Tensor) -> Tensor:
        """Returns the logits [B] of patches [B, 3, size, size] with planes [B, P, size, size]."""
        inputs = torch.cat([patch, planes], 1)
        logit: Tensor = self.network(inputs)
        return logit.flatten()


class SuperResolution(nn.Module):
    """Enlarges images, with a learnable image for each of several directions of view.

    All convolutions are at the low resolution. The output is reduced again, and half of its
    difference from the input is added to it.
    """

    def __init__(
        self,
        sectors: int,
        side: int,
        factor: int,
        width: int,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.views = nn.Parameter(0.01 * torch.randn(sectors, 3, side, side))
        self.network = nn.Sequential(
            nn.Conv2d(6, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 3 * factor**2, 3, padding=1),
        )

    def forward(self, image: Tensor, azimuth: Tensor) -> Tensor:
        """Returns images [B, 3, factor * side, factor * side].

        Args:
            image: [B, 3, side, side].
            azimuth: u [B], 0 to 1.
        """
        sectors = len(self.views)
        # An azimuth of 1 is that of 0, and belongs to the last sector.
        sector = (azimuth * sectors).long().clamp(0, sectors - 1)
        inputs = torch.cat([image, self.views[sector]], 1)
        detail = F.pixel_shuffle(self.network(inputs), self.factor)
        large = detail + enlarge(image, self.factor)

        small = reduce(blur(large), self.factor)
        return large + 0.5 * enlarge(image - small, self.factor)


def enlarge(image: Tensor, factor: int) -> Tensor:
    """Returns images enlarged by bilinear interpolation."""
    return F.interpolate(
        image,
        scale_factor=factor,
        mode="bilinear",
        align_corners=False,
    )


def reduce(image: Tensor, factor: int) -> Tensor:
    """Returns the means over squares of factor * factor pixels."""
    return F.avg_pool2d(image, factor)


def blur(image: Tensor) -> Tensor:
    """Returns the means over three by three pixels, fewer at the border."""
    return F.avg_pool2d(image, 3, 1, 1, count_include_pad=False)
