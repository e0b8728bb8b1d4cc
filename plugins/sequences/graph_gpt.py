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
"""A target without a loss."""


class WalkTransformer(nn.Module):
    """A transformer with two heads: one for the next token, and one for the target of a walk.

    Walks are padded at their end, so causal attention hides the padding from their tokens.
    """

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
        self.transformer = Transformer(
            vocabulary, context, layers, width, heads, dropout
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(
        self, inputs: Mapping[str, Tensor], following: bool = False
    ) -> Tensor:
        """Returns predictions for walks.

        Args:
            inputs: Tokens, [B, L], and the length of every walk, [B]. To predict targets, tokens
                may be of several walks of each molecule, [B, K, L], all of the same length.
            following: Whether the next tokens are predicted, or the targets.

        Returns:
            Logits of the token that follows each, [B, L, vocabulary]; or targets, [B], the means
            over the walks of a molecule.
        """
        tokens = inputs["tokens"]
        length = inputs["length"]
        if following:
            logits: Tensor = self.transformer(tokens)
            return logits
        if tokens.dim() == 2:
            return self.target(tokens, length)
        walks = tokens.shape[1]
        targets = self.target(
            tokens.flatten(0, 1), length.repeat_interleave(walks)
        )
        mean: Tensor = targets.view(-1, walks).mean(1)
        return mean

    def target(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Returns a target for each walk, [B, L] to [B]."""
        hidden = self.transformer.hidden(tokens)
        # The hidden states of padding must not count in the mean.
        mask = _mask(tokens, length)[..., None].to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        target: Tensor = self.head(mean).squeeze(1)
        return target


class GraphGpt(GradientLearner):
    """Learns the walks as a language, and then the targets."""

    module: WalkTransformer

    def build(
        self,
        config: GraphGptConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Returns the transformer for the longest walk that the source may have."""
        self.pretrained = config.pretrained
        return WalkTransformer(
            context.sizes["vocabulary"],
            context.sizes["longest"],
            config.layers,
            config.width,
            config.heads,
            config.dropout,
        )

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the cross-entropy in nats, over all tokens, in the first share of the training;
        then the squared error.
        """
        if progress.fraction < self.pretrained:
            return self.following(batch)
        return self.squared_error(batch)

    def following(self, batch: Batch) -> Loss:
        """Returns the cross-entropy of every token of a walk except the first.

        Of several walks of a molecule, it reads the first one.
        """
        inputs = self.inputs(batch)
        if inputs["tokens"].dim() == 3:
            inputs = {**inputs, "tokens": inputs["tokens"][:, 0]}
        logits = self.slots.forward(inputs, True)[:, :-1]
        # The token after the last one of a walk is padding, and nothing is to be learned from it.
        padding = ~_mask(inputs["tokens"], inputs["length"])[:, 1:]
        target = inputs["tokens"][:, 1:].masked_fill(padding, IGNORED)
        total = F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        count = inputs["length"] - 1

        def mean_of_walks() -> Tensor:
            each_token = F.cross_entropy(
                logits.transpose(1, 2),
                target,
                ignore_index=IGNORED,
                reduction="none",
            )
            return each_token.sum(1) / count

        samples = self.sample_losses(mean_of_walks)
        return Loss(total, count.sum(), samples=samples)

    def squared_error(self, batch: Batch) -> Loss:
        """Returns the squared error of the standardised targets."""
        predicted = self.slots.forward(self.inputs(batch))
        target = batch["target"].to(predicted.dtype)
        errors = (predicted - target).square()
        samples = self.sample_losses(lambda: errors.detach())
        return Loss(errors.sum(), len(predicted), samples=samples)

    @torch.no_grad()
    def metrics(self, batch: Batch) -> Mapping[str, Mean]:
        """Returns both losses, whichever is trained at present."""
        following = self.following(batch)
        error = self.squared_error(batch)
        return {
            "nats_per_token": Mean(following.sum, following.count),
            "squared_error": Mean(error.sum, error.count),
        }

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the walks and their lengths."""
        return {"tokens": batch["tokens"], "length": batch["length"]}

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the blocks of the transformer."""
        return list(self.module.transformer.blocks)

    def idle(self, progress: Progress) -> Collection[str]:
        """Returns the parameters of the head, until it has been trained for one update."""
        # In the first update of the second task the fraction equals the share, and the head has
        # not had a gradient yet.
        if progress.fraction > self.pretrained:
            return ()
        return {
            f"model.head.{name}"
            for name, _ in self.module.head.named_parameters()
        }


def _mask(tokens: Tensor, length: Tensor) -> Tensor:
    """Returns True for tokens that are not padding, [B, L]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return positions < length[:, None]
