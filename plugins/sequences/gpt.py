"""The language model in torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Context, Prunable

from .language_model import Decoder, LanguageModel

if TYPE_CHECKING:
    from .config import GptConfig

STD = 0.02
"""Standard deviation of the initial weights, as in GPT-2; smaller where a layer adds to the
residual stream.
"""


class TransformerBlock(nn.Module):
    """Causal attention and a feed-forward layer, each with a norm before it and a residual
    connection.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the updated hidden states; both are [B, T, width]."""
        attention = self.attention(self.norm1(x))
        x = x + self._drop(self.attended(attention))
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self._drop(self.down(hidden))

    def attention(self, x: Tensor) -> Tensor:
        """Returns the attention of every token to itself and those before it."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, width / heads]
        dropout = self.dropout if self.training else 0.0
        # On a CPU, the backward pass of attention is slower in bfloat16 than in float32.
        if x.device.type == "cpu" and q.dtype == torch.bfloat16:
            with torch.autocast("cpu", enabled=False):
                y = _causal_attention(q.float(), k.float(), v.float(), dropout)
        else:
            y = _causal_attention(q, k, v, dropout)
        return y.transpose(1, 2).flatten(2)

    def prunable(self) -> Iterator[Prunable]:
        """Yields the heads, and the hidden units of the feed-forward layer."""
        yield Prunable(
            "heads",
            self.heads,
            [(self.qkv, 3)],
            [self.attended],
            [(self, "heads")],
        )
        yield Prunable("ff", self.up.out_features, [(self.up, 1)], [self.down])

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """A network from tokens [B, T] to logits [B, T, vocabulary] of the token after each."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        blocks = [
            TransformerBlock(width, heads, dropout) for _ in range(layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.dropout = dropout

        # 2 * layers outputs are added to the residual stream, so that its variance would grow.
        residual_std = STD / math.sqrt(2 * layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=residual_std if is_residual else STD
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits; the last layer is the embedding."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the hidden states of all tokens before the last layer, [B, T, width]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        normalised: Tensor = self.norm(x)
        return normalised


class Gpt(LanguageModel):
    """A transformer with a fixed context length."""

    module: Transformer
    sensitive: ClassVar[tuple[str, ...]] = ("embedding", "position")

    def build(
        self,
        config: GptConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the transformer for windows as long as the source's."""
        (length,) = shapes["tokens"]
        return Transformer(
            context.sizes["vocabulary"],
            length - 1,
            config.layers,
            config.width,
            config.heads,
            config.dropout,
        )

    def prunable(self) -> Iterator[Prunable]:
        """Yields the removable parts of the blocks."""
        for block in self.module.blocks:
            yield from cast(TransformerBlock, block).prunable()

    def decoder(self) -> Decoder:
        """Returns a decoder that computes the complete window of the last tokens for each
        token.
        """
        # There is no cache of keys and values: positions are absolute, so all of them change
        # once the window is full and moves.
        window = torch.empty(0, dtype=torch.long, device=self.device)
        context_length = len(self.module.position.weight)

        def decode(tokens: Tensor) -> Tensor:
            nonlocal window
            window = torch.cat([window, tokens], 1) if len(window) else tokens
            window = window[:, -context_length:]
            logits: Tensor = self.slots.forward(window)
            return logits[:, -1]

        return decode


def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True
    )
