"""The networks: a conditional radiance field, a discriminator of patches, and super-resolution."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)


def encode(x: Tensor, octaves: int) -> Tensor:
    """Returns x [..., D] with its sines and cosines at doubled frequencies, [..., D (1 + 2 octaves)].

    In float32 also inside of autocast: in bfloat16 the highest octaves are noise.
    """
    with torch.autocast(x.device.type, enabled=False):
        frequency = math.pi * 2.0 ** torch.arange(octaves, device=x.device, dtype=x.dtype)
        phase = (x.unsqueeze(-1) * frequency).flatten(-2)
        return torch.cat([x, phase.sin(), phase.cos()], -1)


class Condition(nn.Module):
    """Latent vector, scaled by the normalized embedding of the class: z * norm(embedding[label])."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, latent: Tensor, label: Tensor) -> Tensor:
        """Returns [B, size] from latents [B, size] and labels [B]."""
        scale: Tensor = self.norm(self.embedding(label))
        return latent * scale


class RadianceField(nn.Module):
    """Density and colour at points, from a shape's and an appearance's latent vector (GRAF, arXiv 2007.02442)."""

    def __init__(self, classes: int, width: int, layers: int, latent: int, octaves: tuple[int, int]) -> None:
        super().__init__()
        self.octaves = octaves
        self.shape_condition, self.colour_condition = Condition(classes, latent), Condition(classes, latent)
        point = 3 * (1 + 2 * octaves[0])
        view = 3 * (1 + 2 * octaves[1])
        self.skip = layers // 2
        sizes = [point + latent] + [width] * (layers - 1)
        sizes[self.skip] += point + latent if self.skip else 0
        self.blocks = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.density = nn.Linear(width, 1)
        self.colour = nn.Sequential(nn.Linear(width + view + latent, width // 2), nn.ReLU(), nn.Linear(width // 2, 3))

    def forward(
        self, points: Tensor, direction: Tensor, latent: Tensor, label: Tensor, density_noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Density and colour along rays.

        Args:
            points: [B, R, S, 3].
            direction: [B, R, 3] of length 1.
            latent: [B, 2 * latent], of the shape and of the appearance.
            label: [B].
            density_noise: [B, R, S], added before densities are made positive.

        Returns:
            Densities [B, R, S], and colours [B, R, S, 3] from 0 to 1.
        """
        count = points.shape[1:3]
        shape, appearance = latent.chunk(2, -1)
        shape = self.shape_condition(shape, label)[:, None, None].expand(-1, *count, -1)
        appearance = self.colour_condition(appearance, label)[:, None, None].expand(-1, *count, -1)
        view = encode(direction, self.octaves[1])[:, :, None].expand(-1, -1, count[1], -1)
        inputs = torch.cat([encode(points, self.octaves[0]), shape], -1)
        hidden = inputs
        for number, block in enumerate(self.blocks):
            if number == self.skip and number:
                hidden = torch.cat([hidden, inputs], -1)
            hidden = F.relu(block(hidden))
        density = F.relu(self.density(hidden).squeeze(-1) + density_noise)
        return density, torch.sigmoid(self.colour(torch.cat([hidden, view, appearance], -1)))


class PatchDiscriminator(nn.Module):
    """Maps patches, and planes of what is known of them, to logits."""

    def __init__(self, size: int, planes: int, width: int) -> None:
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
        logit: Tensor = self.network(torch.cat([patch, planes], 1))
        return logit.flatten()


class SuperResolution(nn.Module):
    """Enlarges images, with a learnable image for each of several directions of view.

    All convolutions are at the low resolution. The output is reduced again, and half of its
    difference from the input is added to it.
    """

    def __init__(self, sectors: int, side: int, factor: int, width: int) -> None:
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
        sector = (azimuth * len(self.views)).long().clamp(0, len(self.views) - 1)
        detail = self.network(torch.cat([image, self.views[sector]], 1))
        large = F.pixel_shuffle(detail, self.factor) + enlarge(image, self.factor)
        return large + 0.5 * enlarge(image - reduce(blur(large), self.factor), self.factor)


def enlarge(image: Tensor, factor: int) -> Tensor:
    """Returns images enlarged by bilinear interpolation."""
    return F.interpolate(image, scale_factor=factor, mode="bilinear", align_corners=False)


def reduce(image: Tensor, factor: int) -> Tensor:
    """Returns the means over squares of factor * factor pixels."""
    return F.avg_pool2d(image, factor)


def blur(image: Tensor) -> Tensor:
    """Returns the means over three by three pixels, fewer at the border."""
    return F.avg_pool2d(image, 3, 1, 1, count_include_pad=False)
