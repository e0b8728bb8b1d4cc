"""Mamba-2 in torch (Dao and Gu 2024, "Transformers are SSMs", arXiv 2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Context

from .language_model import Decoder, LanguageModel
from .scans import recurrence

if TYPE_CHECKING:
    from .config import Mamba2Config

Scan = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""x [B, L, H, P], log_decay [B, L, H], b and c [B, L, N] to y [B, L, H, P], as in ``scans``."""
FIRST_STEPS = (1e-3, 1e-1)
"""Between these lie the first time steps, evenly by their logarithms."""
FIRST_RATES = (1.0, 16.0)
"""Between these lie the first rates of decay."""
STD = 0.02
"""Of the first embedding."""


class Memory(NamedTuple):
    """The state of a mixer after the symbols before."""

    window: Tensor  # the last inputs of its convolution, [B, channels, taps - 1]
    state: Tensor  # [B, H, P, N]


class Mamba2Mixer(nn.Module):
    """A selective state space model: what it keeps, takes in and reads depends on the symbol.

    Its parameters have the meaning and order of those of ``Mamba2Mixer`` in the library
    transformers, with one group.
    """

    def __init__(self, config: Mamba2Config, scan: Scan) -> None:
        super().__init__()
        self.inner, self.states, self.taps = config.expand * config.width, config.state, config.taps
        self.heads, self.head_width, self.scan = self.inner // config.head_width, config.head_width, scan
        channels = self.inner + 2 * self.states
        self.enter = nn.Linear(config.width, self.inner + channels + self.heads, bias=False)
        self.convolution = nn.Conv1d(channels, channels, self.taps, groups=channels)
        low, high = map(math.log, FIRST_STEPS)
        first = (low + (high - low) * torch.rand(self.heads)).exp()
        self.delta_bias = nn.Parameter(first + (-torch.expm1(-first)).log())  # softplus of it is the first step
        self.log_rate = nn.Parameter(torch.empty(self.heads).uniform_(*FIRST_RATES).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm, self.leave = nn.RMSNorm(self.inner, eps=1e-5), nn.Linear(self.inner, config.width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        """[B, L, width] to the same; each symbol sees itself and those before it."""
        gate, mixed, delta = self._entered(u)
        mixed = F.silu(self.convolution(F.pad(mixed.mT, (self.taps - 1, 0))).mT)
        with torch.autocast(u.device.type, enabled=False):  # sums and exponentials of steps need their digits
            x, b, c, delta, log_decay = self._parts(mixed, delta)
            y = self.scan(x * delta.unsqueeze(-1), log_decay, b, c)
            y = (y + x * self.skip.unsqueeze(-1)).flatten(-2)
        return self._left(y, gate)

    def step(self, u: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Computes one symbol, [B, width], from the state of the symbols before."""
        gate, mixed, delta = self._entered(u)
        window = torch.cat([memory.window, mixed.unsqueeze(-1)], -1)
        mixed = F.silu(self.convolution(window).squeeze(-1))
        x, b, c, delta, log_decay = self._parts(mixed, delta)
        new = (x * delta.unsqueeze(-1)).unsqueeze(-1) * b[:, None, None, :]
        state = torch.addcmul(new, log_decay.exp()[..., None, None], memory.state)
        y = (state @ c[:, None, :, None]).squeeze(-1)
        y = (y + x * self.skip.unsqueeze(-1)).flatten(-2)
        return self._left(y, gate), Memory(window[..., 1:], state)

    def nothing(self, rows: int) -> Memory:
        """Returns the state before the first symbol."""
        window = self.skip.new_zeros(rows, self.convolution.in_channels, self.taps - 1)
        return Memory(window, self.skip.new_zeros(rows, self.heads, self.head_width, self.states))

    def _entered(self, u: Tensor) -> tuple[Tensor, ...]:
        """The gate, what the convolution takes, and steps before their softplus."""
        return torch.split(self.enter(u), [self.inner, self.inner + 2 * self.states, self.heads], -1)

    def _parts(self, mixed: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """Returns x by heads, b, c, the steps, and the logarithms of the decays, in the
        type of the parameters.
        """
        mixed, delta = mixed.to(self.skip.dtype), F.softplus(delta.to(self.skip.dtype) + self.delta_bias)
        x, b, c = torch.split(mixed, [self.inner, self.states, self.states], -1)
        return x.view(*x.shape[:-1], self.heads, self.head_width), b, c, delta, -self.log_rate.exp() * delta

    def _left(self, y: Tensor, gate: Tensor) -> Tensor:
        gated: Tensor = self.leave(self.norm(y * F.silu(gate)))
        return gated


class Mamba2Block(nn.Module):
    """A mixer, normalised before and added to what came in."""

    def __init__(self, config: Mamba2Config, scan: Scan) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(config.width, eps=1e-5), Mamba2Mixer(config, scan)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] to the same."""
        mixed: Tensor = x + self.mixer(self.norm(x))
        return mixed

    def step(self, x: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Computes the same for one symbol of every row, [B, width]."""
        mixed, after = self.mixer.step(self.norm(x), memory or self.mixer.nothing(len(x)))
        return x + mixed, after


class Mamba2Network(nn.Module):
    """A network from symbols [B, L] to logits [B, L, vocabulary] of the symbol after each; the last
    layer is the embedding.
    """

    def __init__(self, config: Mamba2Config, vocabulary: int, scan: Scan) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.Sequential(*(Mamba2Block(config, scan) for _ in range(config.layers)))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)

    def step(self, symbols: Tensor, memories: Sequence[Memory]) -> tuple[Tensor, list[Memory]]:
        """Computes the same for one symbol of every row, [B], from the states of the blocks: empty
        before the first.
        """
        x, after = self.embedding(symbols), list[Memory]()
        for place, block in enumerate(self.blocks):
            x, memory = cast(Mamba2Block, block).step(x, memories[place] if memories else None)
            after.append(memory)
        return F.linear(self.norm(x), self.embedding.weight), after


class Mamba2(LanguageModel):
    """A language model without attention, whose state does not grow with what was read."""

    module: Mamba2Network

    def build(self, config: Mamba2Config, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """Returns the network, with the recurrence as a slot for stages."""
        return Mamba2Network(config, context.sizes["vocabulary"], lambda *inputs: self.slots.scan(*inputs))

    def scan(self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The recurrence, one symbol after the other."""
        return recurrence(x, log_decay, b, c)

    def decoder(self) -> Decoder:
        """Reads with a state of constant size."""
        memories: list[Memory] = []

        def decode(symbols: Tensor) -> Tensor:
            nonlocal memories
            for each in symbols.unbind(1):
                logits, memories = self.module.step(each, memories)
            return logits

        return decode
