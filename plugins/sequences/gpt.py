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
"""Of the first weights, as in GPT-2; smaller where a layer adds to the stream between the blocks."""


class TransformerBlock(nn.Module):
    """Causal attention and a feed-forward layer, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attended = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        x = x + self._drop(self.attended(self.attention(self.norm1(x))))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, x: Tensor) -> Tensor:
        """Returns the attention of every symbol to itself and those before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if x.device.type == "cpu" and q.dtype == torch.bfloat16:  # its backward is slower there than float32's
            with torch.autocast("cpu", enabled=False):
                y = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), dropout_p=dropout, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return y.transpose(1, 2).flatten(2)

    def prunable(self) -> Iterator[Prunable]:
        """Heads, and what is inside of the feed-forward layer."""
        yield Prunable("heads", self.heads, [(self.qkv, 3)], [self.attended], [(self, "heads")])
        yield Prunable("ff", self.up.out_features, [(self.up, 1)], [self.down])

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """A network from symbols [B, T] to logits [B, T, vocabulary] of the symbol after each."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(parameter, std=STD / math.sqrt(2 * layers) if adds else STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits; the last layer is the embedding."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the vectors of all symbols before the last layer, [B, T, width]."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        normalised: Tensor = self.norm(x)
        return normalised


class Gpt(LanguageModel):
    """A transformer of one fixed window."""

    module: Transformer
    sensitive: ClassVar[tuple[str, ...]] = ("embedding", "position")

    def build(self, config: GptConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """The transformer for windows as long as the source's."""
        (length,) = shapes["tokens"]
        vocabulary = context.sizes["vocabulary"]
        return Transformer(vocabulary, length - 1, config.layers, config.width, config.heads, config.dropout)

    def prunable(self) -> Iterator[Prunable]:
        """Yields the removable parts of the blocks."""
        for block in self.module.blocks:
            yield from cast(TransformerBlock, block).prunable()

    def decoder(self) -> Decoder:
        """Returns a decoder that computes the complete window of the last symbols for each
        symbol.
        """
        window = torch.empty(0, dtype=torch.long, device=self.device)

        def decode(symbols: Tensor) -> Tensor:
            nonlocal window
            window = torch.cat([window, symbols], 1) if len(window) else symbols
            window = window[:, -len(self.module.position.weight) :]
            logits: Tensor = self.slots.forward(window)
            return logits[:, -1]

        return decode
