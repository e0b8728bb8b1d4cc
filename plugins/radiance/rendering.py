"""Volume rendering along rays, as functions of tensors (Max 1995; Mildenhall et al. 2020, arXiv 2003.08934)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rendering(NamedTuple):
    """What rays show."""

    colour: Tensor
    """[..., 3]."""
    opacity: Tensor
    """[...]: how much of the background is hidden, 0 to 1."""
    weights: Tensor
    """[..., S]: the share of every sample in the colour; with the background's they add up to 1."""


def stratified_depths(near: float, far: float, jitter: Tensor) -> Tensor:
    """Returns one depth in each of S equal intervals between near and far.

    Args:
        near: Where rays begin.
        far: Where rays end.
        jitter: [..., S]: the place in every interval, 0 to 1.
    """
    count = jitter.shape[-1]
    first = torch.arange(count, device=jitter.device, dtype=jitter.dtype)
    return near + (far - near) * (first + jitter) / count


def lengths(depths: Tensor, near: float, far: float) -> Tensor:
    """Returns the lengths [..., S] of the parts of a ray for which its samples stand.

    Parts meet half-way between two samples, so that they add up to far - near.
    """
    middle = (depths[..., 1:] + depths[..., :-1]) / 2
    ends = (*middle.shape[:-1], 1)
    edges = torch.cat([middle.new_full(ends, near), middle, middle.new_full(ends, far)], -1)
    return edges.diff(dim=-1)


def composite(density: Tensor, colour: Tensor, length: Tensor, background: float = 1.0) -> Rendering:
    """Adds up the colours along rays on a background.

    With opacities a_i = 1 - exp(-density_i length_i) and transmittances T_i = prod_{j<i} (1 - a_j), the colour is
    sum T_i a_i c_i + (1 - sum T_i a_i) background.

    Args:
        density: [..., S], at least 0.
        colour: [..., S, 3].
        length: [..., S].
        background: Of all three channels.
    """
    # In float32 also inside of autocast, because sums of logarithms lose their small terms in 16 bits.
    with torch.autocast(density.device.type, enabled=False):
        dtype = torch.promote_types(density.dtype, torch.float32)
        passed = density.to(dtype) * length.to(dtype)
        before = torch.cumsum(passed, -1) - passed
        weights = torch.exp(-before) * -torch.expm1(-passed)
        remaining = torch.exp(-passed.sum(-1))
        shown = (weights.unsqueeze(-1) * colour.to(dtype)).sum(-2)
        return Rendering(shown + remaining.unsqueeze(-1) * background, 1 - remaining, weights)


def importance_depths(weights: Tensor, depths: Tensor, near: float, far: float, uniform: Tensor) -> Tensor:
    """Returns more depths where the weights are large, by inverting their cumulative distribution.

    Args:
        weights: [..., S], as ``composite`` returns them for ``depths``.
        depths: [..., S], sorted.
        near: Where rays begin.
        far: Where rays end.
        uniform: [..., M], 0 to 1: where in the distribution.

    Returns:
        All depths [..., S + M], sorted.
    """
    length = lengths(depths, near, far)
    # A little of everything, so that a ray which shows nothing has a distribution, too.
    share = (weights.detach() + 1e-3) / (weights.detach() + 1e-3).sum(-1, keepdim=True)
    upper = torch.cumsum(share, -1)
    index = torch.searchsorted(upper.contiguous(), uniform.contiguous()).clamp(max=depths.shape[-1] - 1)
    begin = near + torch.cumsum(length, -1) - length
    into = (uniform - (upper - share).gather(-1, index)) / share.gather(-1, index)
    more = begin.gather(-1, index) + into.clamp(0, 1) * length.gather(-1, index)
    return torch.cat([depths, more], -1).sort(-1).values
