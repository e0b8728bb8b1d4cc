"""Diffusion: noise schedules and samplers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["cosine", "linear_seed"]


def alphas_cumprod(schedule: Schedule, steps: int) -> Tensor:
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
    """Returns signal and noise on the straight line between them, [steps] each.

    This is rectified flow (Liu et al., arXiv 2209.03003).
    """
    time = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    return 1 - time, time


def trailing(steps: int, training_steps: int) -> list[int]:
    """Returns the timesteps of a shorter sampling, the last first.

    The spacing is "trailing" of Lin et al. (arXiv 2305.08891), which includes the last one.
    """
    return [
        round(training_steps - step * training_steps / steps) - 1
        for step in range(steps)
    ]


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
        noise: The last of [T, ...] is the start; with an ``eta``, the rest is added step by step.
        signal: The share of the signal at every step, [T].
        sigma: The share of the noise, [T].
        steps: Number of evaluations of the network.
        eta: The share of fresh noise at every step, 0 to 1; with 1 as much as ``ddpm`` uses. Only
            if the squares of signal and sigma add up to one.

    Returns:
        Samples like one of ``noise``.
    """
    x = noise[-1]
    timesteps = trailing(steps, len(signal))
    for timestep, next_timestep in zip(
        timesteps, [*timesteps[1:], None], strict=True
    ):
        x0 = denoise(x, timestep)
        if next_timestep is None:
            return x0
        predicted_noise = (x - signal[timestep] * x0) / sigma[timestep]
        next_sigma = sigma[next_timestep]
        x = signal[next_timestep] * x0
        if eta:
            ratio = signal[timestep] / signal[next_timestep]
            deviation = (1 - ratio.square()).sqrt()
            fresh_sigma = eta * next_sigma / sigma[timestep] * deviation
            x = x + fresh_sigma * noise[next_timestep]
            # Predicted and fresh noise together have the variance of the schedule. Rounding can
            # make the difference negative when ``eta`` is one.
            variance = next_sigma.square() - fresh_sigma.square()
            next_sigma = variance.clamp(min=0).sqrt()
        x = x + next_sigma * predicted_noise
    raise AssertionError("there is at least one step")


def multistep_consistency(
    denoise: Denoise, noise: Tensor, signal: Tensor, sigma: Tensor, steps: int
) -> Tensor:
    """Samples from a consistent network (Song et al., arXiv 2303.01469, algorithm 1).

    Args:
        denoise: The network, which predicts the same signal from all levels of a trajectory.
        noise: The last of [T, ...] is the start; between two evaluations, that of the level is
            added.
        signal: The share of the signal at every step, [T].
        sigma: The share of the noise, [T].
        steps: Number of evaluations of the network.

    Returns:
        Samples like one of ``noise``.
    """
    first, *later = trailing(steps, len(signal))
    x0 = denoise(noise[-1], first)
    for timestep in later:
        x = signal[timestep] * x0 + sigma[timestep] * noise[timestep]
        x0 = denoise(x, timestep)
    return x0


def ddpm(denoise: Denoise, noise: Tensor, alphas_cumprod: Tensor) -> Tensor:
    """Samples with fresh noise in every step (Ho et al., arXiv 2006.11239, equations 6 and 7).

    Args:
        denoise: The network.
        noise: The start, and the noise of every step, [T, ...].
        alphas_cumprod: Alpha-bar, [T].

    Returns:
        Samples [...].
    """
    x = noise[-1]
    previous_cumprod = torch.cat(
        [alphas_cumprod.new_ones(1), alphas_cumprod[:-1]]
    )
    alpha = alphas_cumprod / previous_cumprod
    for timestep in reversed(range(len(alphas_cumprod))):
        x0 = denoise(x, timestep)
        beta = 1 - alpha[timestep]
        previous = previous_cumprod[timestep]
        previous_variance = 1 - previous
        variance = 1 - alphas_cumprod[timestep]
        x = alpha[timestep].sqrt() * previous_variance / variance * x
        x = previous.sqrt() * beta / variance * x0 + x
        # The last step adds no noise: its result is the sample.
        if timestep > 0:
            deviation = (previous_variance / variance * beta).sqrt()
            x = x + deviation * noise[timestep - 1]
    return x
