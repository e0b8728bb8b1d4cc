"""A transformer that denoises sets (DiT, Peebles and Xie 2023, arXiv 2212.09748)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Prunable


class CrossAttention(nn.Module):
    """Attention of every member of a set to another set, or to the same one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        """Returns what the members [B, G, width] of a set gather from another, [B, M, width]."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys_and_values = self.kv(other).unflatten(-1, (2, self.heads, -1))
        k, v = keys_and_values.permute(2, 0, 3, 1, 4)
        gathered = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        output: Tensor = self.out(gathered.flatten(2))
        return output

    def prunable(self) -> Iterator[Prunable]:
        """Yields the heads."""
        yield Prunable(
            "heads",
            self.heads,
            [(self.q, 1), (self.kv, 2)],
            [self.out],
            [(self, "heads")],
        )


class DitBlock(nn.Module):
    """Attention to the set, to the tokens of the cloud, and a feed-forward layer; time shifts,
    scales and gates each.

    The gates are zero at first, so that a block starts as the identity.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.own = CrossAttention(width, heads)
        self.cloud = CrossAttention(width, heads)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 9 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, tokens: Tensor, time: Tensor) -> Tensor:
        """Returns the set [B, G, width], given tokens [B, M, width] and time [B, width]."""
        changes = self.modulation(F.silu(time))[:, None].chunk(9, -1)
        shifts = changes[:3]
        scales = changes[3:6]
        gates = changes[6:]

        def entered(index: int) -> Tensor:
            modulated: Tensor = (
                self.norm(x) * (1 + scales[index]) + shifts[index]
            )
            return modulated

        y = entered(0)
        x = x + gates[0] * self.own(y, y)
        x = x + gates[1] * self.cloud(entered(1), tokens)
        output: Tensor = x + gates[2] * self.feed(entered(2))
        return output

    def prunable(self) -> Iterator[Prunable]:
        """Yields the heads of both attentions, and the features of the feed-forward layer."""
        up, _, down = cast(
            "tuple[nn.Linear, nn.Module, nn.Linear]", tuple(self.feed)
        )
        yield from self.own.prunable()
        yield from self.cloud.prunable()
        yield Prunable("ff", up.out_features, [(up, 1)], [down])


class SetTransformer(nn.Module):
    """A network from a set of vectors, tokens and a time to a set of vectors,
    independent of the order.
    """

    def __init__(
        self, inputs: int, outputs: int, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.leave = nn.Linear(width, outputs)
        self.time = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(
            DitBlock(width, heads) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, tokens: Tensor, time: Tensor) -> Tensor:
        """Returns a set [B, G, outputs] for one of [B, G, inputs].

        Args:
            x: The set.
            tokens: Tokens of the cloud, [B, M, width].
            time: Time in [0, 1], [B].
        """
        # In bf16, neighbouring timesteps are the same number.
        with torch.autocast(x.device.type, enabled=False):
            wider = time.to(torch.promote_types(time.dtype, torch.float32))
            embedded = self.time(waves(wider, self.enter.out_features))
        y = self.enter(x)
        for block in self.blocks:
            y = block(y, tokens, embedded)
        denoised: Tensor = self.leave(self.norm(y))
        return denoised


def waves(time: Tensor, width: int) -> Tensor:
    """Returns sines and cosines of times in [0, 1], [B] to [B, width].

    Their periods are from a hundredth to a hundred.
    """
    lowest = math.log(0.06)
    highest = math.log(600)
    exponents = torch.linspace(lowest, highest, width // 2, device=time.device)
    angle = time[:, None] * torch.exp(exponents)
    return torch.cat([angle.sin(), angle.cos()], 1)
