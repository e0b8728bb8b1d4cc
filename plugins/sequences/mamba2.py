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
INITIAL_STEPS = (1e-3, 1e-1)
"""Range of the initial time steps, whose logarithms are uniform."""
INITIAL_RATES = (1.0, 16.0)
"""Range of the initial rates of decay."""
STD = 0.02
"""Standard deviation of the initial embedding."""


class DecodingState(NamedTuple):
    """The state of a mixer after the tokens before.

    Attributes:
        window: The last inputs of its convolution, [B, channels, taps - 1].
        hidden: The hidden state of the recurrence, [B, H, P, N].
    """

    window: Tensor
    hidden: Tensor


class Mamba2Mixer(nn.Module):
    """A selective state-space model: what it keeps, takes in and reads depends on the token.

    Its parameters have the meaning and order of those of ``Mamba2Mixer`` in the library
    transformers, with one group.
    """

    def __init__(self, config: Mamba2Config, scan: Scan) -> None:
        super().__init__()
        self.inner = config.expand * config.width
        self.states = config.state
        self.taps = config.taps
        self.heads = self.inner // config.head_width
        self.head_width = config.head_width
        self.scan = scan
        self.channels = self.inner + 2 * self.states

        projected = self.inner + self.channels + self.heads
        self.enter = nn.Linear(config.width, projected, bias=False)
        # One group per channel: the convolution mixes tokens, and never channels.
        self.convolution = nn.Conv1d(
            self.channels, self.channels, self.taps, groups=self.channels
        )
        # One rate per head, and one step per token and head, as in Mamba-2. Both are stored such
        # that any value of a parameter is a positive rate or step.
        low, high = map(math.log, INITIAL_STEPS)
        steps = (low + (high - low) * torch.rand(self.heads)).exp()
        self.delta_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())
        rates = torch.empty(self.heads).uniform_(*INITIAL_RATES)
        self.log_rate = nn.Parameter(rates.log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner, eps=1e-5)
        self.leave = nn.Linear(self.inner, config.width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        """Returns updates of the hidden states; both are [B, L, width].

        Each token depends on itself and those before it.
        """
        gate, mixed, delta = self._project_in(u)
        # Padding at the start alone keeps the convolution causal.
        padded = F.pad(mixed.mT, (self.taps - 1, 0))
        mixed = F.silu(self.convolution(padded).mT)
        # Sums and exponentials of time steps need the digits of float32.
        with torch.autocast(u.device.type, enabled=False):
            x, b, c, delta, log_decay = self._ssm_inputs(mixed, delta)
            y = self.scan(x * delta.unsqueeze(-1), log_decay, b, c)
            y = self._add_skip(y, x)
        return self._project_out(y, gate)

    def step(
        self, u: Tensor, state: DecodingState
    ) -> tuple[Tensor, DecodingState]:
        """Computes one token, [B, width], from the state of the tokens before."""
        gate, mixed, delta = self._project_in(u)
        window = torch.cat([state.window, mixed.unsqueeze(-1)], -1)
        mixed = F.silu(self.convolution(window).squeeze(-1))
        x, b, c, delta, log_decay = self._ssm_inputs(mixed, delta)

        scaled = x * delta.unsqueeze(-1)
        update = scaled.unsqueeze(-1) * b[:, None, None, :]
        decay = log_decay.exp()[..., None, None]
        hidden = torch.addcmul(update, decay, state.hidden)
        y = (hidden @ c[:, None, :, None]).squeeze(-1)
        y = self._add_skip(y, x)
        state = DecodingState(window[..., 1:], hidden)
        return self._project_out(y, gate), state

    def initial_state(self, rows: int) -> DecodingState:
        """Returns the state before the first token."""
        zeros = self.skip.new_zeros
        return DecodingState(
            window=zeros(rows, self.channels, self.taps - 1),
            hidden=zeros(rows, self.heads, self.head_width, self.states),
        )

    def _project_in(self, u: Tensor) -> tuple[Tensor, ...]:
        """Returns the gate, the input of the convolution, and the steps before their softplus."""
        return torch.split(
            self.enter(u), [self.inner, self.channels, self.heads], -1
        )

    def _ssm_inputs(self, mixed: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """Returns the inputs of the recurrence, in the type of the parameters.

        Args:
            mixed: Outputs of the convolution, [..., channels].
            delta: Time steps before their softplus, [..., H].

        Returns:
            Inputs x by heads, [..., H, P]; b and c, [..., N]; time steps and the logarithms of
            the decays, [..., H].
        """
        dtype = self.skip.dtype
        mixed = mixed.to(dtype)
        delta = F.softplus(delta.to(dtype) + self.delta_bias)
        x, b, c = torch.split(mixed, [self.inner, self.states, self.states], -1)
        x = x.view(*x.shape[:-1], self.heads, self.head_width)
        log_decay = -self.log_rate.exp() * delta
        return x, b, c, delta, log_decay

    def _add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the direct path from input to output, and concatenates the heads."""
        return (y + x * self.skip.unsqueeze(-1)).flatten(-2)

    def _project_out(self, y: Tensor, gate: Tensor) -> Tensor:
        output: Tensor = self.leave(self.norm(y * F.silu(gate)))
        return output


class Mamba2Block(nn.Module):
    """A mixer with a norm before it and a residual connection."""

    def __init__(self, config: Mamba2Config, scan: Scan) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixer = Mamba2Mixer(config, scan)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the updated hidden states; both are [B, L, width]."""
        updated: Tensor = x + self.mixer(self.norm(x))
        return updated

    def step(
        self, x: Tensor, state: DecodingState | None
    ) -> tuple[Tensor, DecodingState]:
        """Computes the same for one token of every row, [B, width]."""
        if state is None:
            state = self.mixer.initial_state(len(x))
        update, state = self.mixer.step(self.norm(x), state)
        return x + update, state


class Mamba2Network(nn.Module):
    """A network from tokens [B, L] to logits [B, L, vocabulary] of the token after each; the last
    layer is the embedding.
    """

    def __init__(
        self, config: Mamba2Config, vocabulary: int, scan: Scan
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        blocks = [Mamba2Block(config, scan) for _ in range(config.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits."""
        return self._logits(self.blocks(self.embedding(tokens)))

    def step(
        self, tokens: Tensor, states: Sequence[DecodingState]
    ) -> tuple[Tensor, list[DecodingState]]:
        """Computes the same for one token of every row.

        Args:
            tokens: The tokens, [B].
            states: The states of the blocks after the tokens before; empty before the first.

        Returns:
            The logits, [B, vocabulary], and the new states.
        """
        x = self.embedding(tokens)
        new_states: list[DecodingState] = []
        for index, block in enumerate(self.blocks):
            state = states[index] if states else None
            x, state = cast(Mamba2Block, block).step(x, state)
            new_states.append(state)
        return self._logits(x), new_states

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class Mamba2(LanguageModel):
    """A language model without attention, whose state has the same size for any context length."""

    module: Mamba2Network

    def build(
        self,
        config: Mamba2Config,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the network, with the recurrence as a slot for stages."""

        # Stages replace the slot after the network is built, so it is looked up at each call.
        def scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
            y: Tensor = self.slots.scan(x, log_decay, b, c)
            return y

        return Mamba2Network(config, context.sizes["vocabulary"], scan)

    def scan(
        self, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor
    ) -> Tensor:
        """Computes the recurrence, one token after the other."""
        return recurrence(x, log_decay, b, c)

    def decoder(self) -> Decoder:
        """Returns a decoder with a state of constant size."""
        states: list[DecodingState] = []

        def decode(tokens: Tensor) -> Tensor:
            nonlocal states
            for column in tokens.unbind(1):
                logits, states = self.module.step(column, states)
            return logits

        return decode
