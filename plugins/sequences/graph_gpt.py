"""The model of walks through graphs in torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .gpt import Transformer

if TYPE_CHECKING:
    from .graph_config import GraphGptConfig


IGNORED = -100
"""A target that costs nothing."""


class WalkTransformer(nn.Module):
    """A transformer with two last layers: one for the next token, and one for what was measured.

    Walks are padded at their end, so causal attention keeps what is real from seeing it.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary, context, layers, width, heads, dropout)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, inputs: Mapping[str, Tensor], following: bool = False) -> Tensor:
        """Logits of the token that follows each, [B, L, vocabulary], or what is expected to be measured, [B]."""
        if following:
            logits: Tensor = self.transformer(inputs["tokens"])
            return logits
        hidden = self.transformer.hidden(inputs["tokens"])
        real = _real(inputs)[..., None].to(hidden.dtype)
        value: Tensor = self.head((hidden * real).sum(1) / real.sum(1)).squeeze(1)
        return value


class GraphGpt(GradientLearner):
    """Learns walks as a language, and then what was measured."""

    module: WalkTransformer

    def build(self, config: GraphGptConfig, shapes: Mapping[str, tuple[int, ...]], context: Context) -> nn.Module:
        """The transformer for the longest walk that the source may have."""
        self.pretrained = config.pretrained
        vocabulary, longest = context.sizes["vocabulary"], context.sizes["longest"]
        return WalkTransformer(vocabulary, longest, config.layers, config.width, config.heads, config.dropout)

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the cross-entropy in nats, over all tokens, in the first share of the training;
        then the squared error.
        """
        return self.following(batch) if progress.fraction < self.pretrained else self.squared_error(batch)

    def following(self, batch: Batch) -> Loss:
        """Cross-entropy of every token of a walk but the first."""
        inputs = self.inputs(batch)
        logits, target = self.slots.forward(inputs, True)[:, :-1], inputs["tokens"][:, 1:]
        target = target.masked_fill(~_real(inputs)[:, 1:], IGNORED)
        cost = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(cost, (inputs["length"] - 1).sum())

    def squared_error(self, batch: Batch) -> Loss:
        """Returns the squared error of the standardised measurement."""
        value = self.slots.forward(self.inputs(batch))
        return Loss((value - batch["target"].to(value.dtype)).square().sum(), len(value))

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns both losses, whichever is trained at present."""
        following, error = self.following(batch), self.squared_error(batch)
        return {
            "nats_per_token": Mean(following.sum, following.count),
            "squared_error": Mean(error.sum, error.count),
        }

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Walks and how long they are."""
        return {"tokens": batch["tokens"], "length": batch["length"]}

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the blocks of the transformer."""
        return list(self.module.transformer.blocks)

    def idle(self, progress: Progress) -> Collection[str]:
        """Returns the parameters of the head, until it has been trained for one update."""
        names = (f"model.head.{name}" for name, _ in self.module.head.named_parameters())
        return set(names) if progress.fraction <= self.pretrained else ()


def _real(inputs: Mapping[str, Tensor]) -> Tensor:
    """Returns which tokens are not padding, [B, L]."""
    tokens, length = inputs["tokens"], inputs["length"]
    return torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
