"""Networks of one agent and the squashed Gaussian policy."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional

LOG_STD_MIN = -20.0
LOG_STD_MAX = 2.0
Precision = Callable[[], AbstractContextManager[None]]


class Mlp(nn.Module):
    """Linear, LayerNorm, ReLU for every hidden layer, and a linear head.

    Trunk and head are separate because the head stays in full precision under autocast: Q values of
    some hundreds do not fit the spacing of 16-bit numbers.
    """

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in hidden:
            linear = nn.Linear(inputs, width)
            nn.init.kaiming_uniform_(
                linear.weight, nonlinearity="relu", generator=generator
            )
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.LayerNorm(width), nn.ReLU()]
            inputs = width
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, outputs)
        nn.init.normal_(self.head.weight, std=0.01, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor, precision: Precision) -> Tensor:
        """Returns [B, outputs] for [B, inputs]; the trunk runs in the context of ``precision``."""
        with precision():
            hidden = self.trunk(inputs)
        # The head computes in the type of its parameters, outside of autocast.
        output: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return output


class TwinCritic(nn.Module):
    """Two independent Q functions of the same inputs."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        self.q1 = Mlp(inputs, hidden, 1, generator)
        self.q2 = Mlp(inputs, hidden, 1, generator)

    def forward(self, inputs: Tensor, precision: Precision) -> Tensor:
        """Returns both values, [B, 2], for [B, inputs]."""
        values = [self.q1(inputs, precision), self.q2(inputs, precision)]
        return torch.cat(values, dim=-1)


def squash(head: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a reparameterised sample of the tanh-squashed Gaussian and its log-probability.

    Haarnoja et al. 2018 (arXiv:1812.05905), appendix C, with log(1 - tanh(u)^2) = 2 (log 2 - u -
    softplus(-2 u)).

    Args:
        head: mean and log standard deviation, [..., 2 a].
        noise: standard normal numbers, [..., a].

    Returns:
        Action in (-1, 1), [..., a], and log-probability, [...].
    """
    mean, log_std = head.chunk(2, dim=-1)
    log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
    unbounded = mean + log_std.exp() * noise
    log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # The direct form, log(1 - tanh(u)^2), is the logarithm of zero for large u.
    linear = math.log(2) - unbounded
    softplus = functional.softplus(-2 * unbounded)
    log_prob = log_prob - 2 * (linear - softplus)
    return unbounded.tanh(), log_prob.sum(-1)
