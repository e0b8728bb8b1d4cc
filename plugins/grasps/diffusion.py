"""Diffusion: noise schedules and samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["cosine", "linear_seed"]


def kept_signal(schedule: Schedule, steps: int) -> Tensor:
    """Returns the share of the signal in the variance after every step, alpha-bar,
    [steps] in float64.

    ``cosine`` is Nichol and Dhariwal's (arXiv 2102.09672, equation 17; s = 0.008, beta at most
    0.999). ``linear_seed`` has betas from 1e-4 to 0.01: with a hundred steps 0.60 of the variance
    is still signal when sampling starts with pure noise.
    """
    if schedule == "linear_seed":
        beta = torch.linspace(1e-4, 0.01, steps, dtype=torch.float64)
    else:
        time = torch.arange(steps + 1, dtype=torch.float64) / steps
        curve = torch.cos((time + 0.008) / 1.008 * math.pi / 2).square()
        beta = (1 - curve[1:] / curve[:-1]).clamp(max=0.999)
    return (1 - beta).cumprod(0)


def straight(steps: int) -> tuple[Tensor, Tensor]:
    """Signal and noise on the straight line between them (rectified flow, Liu et al., arXiv
    2209.03003), [steps].
    """
    time = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    return 1 - time, time


def trailing(steps: int, of: int) -> list[int]:
    """The steps at which a shorter sampling looks, the last first (Lin et al., arXiv 2305.08891,
    "trailing").
    """
    return [round(of - place * of / steps) - 1 for place in range(steps)]


Denoise = Callable[[Tensor, int], Tensor]
"""Predicts the signal from a noisy sample and its step."""


def ddim(
    denoise: Denoise,
    noise: Tensor,
    signal: Tensor,
    sigma: Tensor,
    steps: int,
    eta: float = 0.0,
) -> Tensor:
    """Samples in fewer steps (Song et al., arXiv 2010.02502, equations 12 and 16).

    Args:
        denoise: The network.
        noise: The last of [T, ...] is the start; with an ``eta``, others are added at every step.
        signal: The share of the signal at every step, [T].
        sigma: The share of the noise, [T].
        steps: Number of evaluations of the network.
        eta: The share of fresh noise at every step, 0 to 1; with 1 as much as ``ddpm`` uses. Only
            if the squares of signal and sigma add up to one.

    Returns:
        Samples like one of ``noise``.
    """
    x = noise[-1]
    places = trailing(steps, len(signal))
    for place, following in zip(places, [*places[1:], None], strict=True):
        clean = denoise(x, place)
        if following is None:
            return clean
        found = (x - signal[place] * clean) / sigma[place]
        kept = sigma[following]
        x = signal[following] * clean
        if eta:
            fresh = (
                eta
                * kept
                / sigma[place]
                * (1 - (signal[place] / signal[following]).square()).sqrt()
            )
            x = x + fresh * noise[following]
            kept = (kept.square() - fresh.square()).clamp(min=0).sqrt()
        x = x + kept * found
    raise AssertionError("there is at least one step")


def ddpm(denoise: Denoise, noise: Tensor, kept: Tensor) -> Tensor:
    """Samples with fresh noise in every step (Ho et al., arXiv 2006.11239, equations 6 and 7).

    Args:
        denoise: The network.
        noise: The start, and the noise of every step, [T, ...].
        kept: Alpha-bar, [T].

    Returns:
        Samples [...].
    """
    x = noise[-1]
    before = torch.cat([kept.new_ones(1), kept[:-1]])
    alpha = kept / before
    for place in reversed(range(len(kept))):
        clean = denoise(x, place)
        rest = 1 - kept[place]
        mean = before[place].sqrt() * (1 - alpha[place]) / rest * clean
        mean = mean + alpha[place].sqrt() * (1 - before[place]) / rest * x
        x = (
            mean
            if place == 0
            else mean
            + ((1 - before[place]) / rest * (1 - alpha[place])).sqrt()
            * noise[place - 1]
        )
    return x
