"""Volume rendering along rays, as functions of tensors.

Max 1995, and Mildenhall et al. 2020 (NeRF, arXiv 2003.08934).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_WEIGHT = 1e-3
"""Weight that importance sampling adds to every segment of a ray."""


class Rendering(NamedTuple):
    """Colours along rays, and how they were composed."""

    colour: Tensor
    """[..., 3]."""
    opacity: Tensor
    """[...], 0 to 1: the share of the background that is hidden."""
    weights: Tensor
    """[..., S]: the share of each sample in the colour. With the background's they add up to 1."""


def stratified_depths(near: float, far: float, jitter: Tensor) -> Tensor:
    """Returns one depth in each of S equal intervals between near and far.

    Args:
        near: Distance at which rays start.
        far: Distance at which rays end.
        jitter: [..., S], 0 to 1: the position in each interval.
    """
    count = jitter.shape[-1]
    first = torch.arange(
        count,
        device=jitter.device,
        dtype=jitter.dtype,
    )
    return near + (far - near) * (first + jitter) / count


def lengths(depths: Tensor, near: float, far: float) -> Tensor:
    """Returns the lengths [..., S] of the segments of a ray, one for each sample.

    Segments meet half-way between two samples, so that they add up to far - near.
    """
    middle = (depths[..., 1:] + depths[..., :-1]) / 2
    end_shape = (*middle.shape[:-1], 1)
    start = middle.new_full(end_shape, near)
    end = middle.new_full(end_shape, far)
    edges = torch.cat([start, middle, end], -1)
    return edges.diff(dim=-1)


def composite(
    density: Tensor, colour: Tensor, length: Tensor, background: float = 1.0
) -> Rendering:
    """Adds up the colours along rays on a background.

    With opacities a_i = 1 - exp(-density_i length_i) and transmittances T_i = prod_{j<i} (1 - a_j),
    the colour is sum T_i a_i c_i + (1 - sum T_i a_i) background.

    Args:
        density: [..., S], at least 0.
        colour: [..., S, 3].
        length: [..., S].
        background: Value of all three channels.
    """
    # In float32 also inside of autocast: sums of logarithms lose their small terms in 16 bits.
    with torch.autocast(density.device.type, enabled=False):
        dtype = torch.promote_types(density.dtype, torch.float32)
        thickness = density.to(dtype) * length.to(dtype)
        thickness_before = torch.cumsum(thickness, -1) - thickness
        # expm1 is exact where a segment is nearly transparent.
        opacity = -torch.expm1(-thickness)
        weights = torch.exp(-thickness_before) * opacity
        transmittance = torch.exp(-thickness.sum(-1))

        weighted = weights.unsqueeze(-1) * colour.to(dtype)
        foreground = weighted.sum(-2)
        image = foreground + transmittance.unsqueeze(-1) * background
        return Rendering(image, 1 - transmittance, weights)


def importance_depths(
    weights: Tensor, depths: Tensor, near: float, far: float, uniform: Tensor
) -> Tensor:
    """Returns more depths where the weights are large, by inverting their cumulative distribution.

    Args:
        weights: [..., S], as ``composite`` returns them for ``depths``.
        depths: [..., S], sorted.
        near: Distance at which rays start.
        far: Distance at which rays end.
        uniform: [..., M], 0 to 1: quantiles of the distribution.

    Returns:
        All depths [..., S + M], sorted.
    """
    length = lengths(depths, near, far)
    # The constant gives a distribution also to a ray that meets no object.
    positive = weights.detach() + LEAST_WEIGHT
    share = positive / positive.sum(-1, keepdim=True)
    upper = torch.cumsum(share, -1)
    lower = upper - share

    # Rounding may leave the last bound below 1, and a number above it.
    last = depths.shape[-1] - 1
    segment = torch.searchsorted(upper.contiguous(), uniform.contiguous())
    segment = segment.clamp(max=last)

    start = near + torch.cumsum(length, -1) - length
    offset = uniform - lower.gather(-1, segment)
    position = (offset / share.gather(-1, segment)).clamp(0, 1)
    samples = start.gather(-1, segment) + position * length.gather(-1, segment)
    depths = torch.cat([depths, samples], -1)
    return depths.sort(-1).values
