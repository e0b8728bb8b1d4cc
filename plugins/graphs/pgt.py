"""The pre-training of a graph transformer on contexts of nodes, in torch (PGT, arXiv:2407.03953).

Hidden nodes are excluded from the encoder, and a trained token represents them in the decoder, as
in He et al. 2022 (arXiv:2111.06377): the encoder reads only the visible nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from runner.api import Batch, Context, GradientLearner, Loss, Mean, Progress

from .attention import Attention

if TYPE_CHECKING:
    from .attention import Kind
    from .pgt_config import PgtConfig

CONTEXT = ("x", "mask", "weight")
"""The tensors of a context that the network reads."""
STD = 0.02
"""Initial standard deviation of the trained tokens."""


class AttentionBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, kind: Kind) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, kind)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns the nodes [B, N, width] after the block; the mask marks real ones, [B, N]."""
        x = x + self.attention(self.norm1(x), mask)
        feed_forward: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + feed_forward


class ContextTransformer(nn.Module):
    """Embeds contexts, and restores what is hidden in them."""

    def __init__(self, components: int, config: PgtConfig) -> None:
        super().__init__()
        width = config.width
        block = (config.width, config.heads, config.attention)
        self.masked = config.masked
        self.embedding, self.rank, self.decoder_rank = (
            nn.Linear(inputs, width) for inputs in (components, 1, 1)
        )
        self.own = nn.Parameter(STD * torch.randn(width))
        self.mask_token = nn.Parameter(STD * torch.randn(width))
        self.encoder = nn.ModuleList(
            AttentionBlock(*block) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.bridge = nn.Linear(width, width)
        self.decoder = nn.ModuleList(
            AttentionBlock(*block) for _ in range(config.decoder_layers)
        )
        self.restore = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, components)
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        weight: Tensor,
        chance: Tensor | None = None,
    ) -> Any:
        """Embeds contexts; with chance it hides a share of each, and restores it.

        Args:
            x: features, [B, N, F]; the first node is the one that the context is of.
            mask: which nodes are real, [B, N].
            weight: share of the walk, [B, N].
            chance: uniform numbers, [B, N]; the nodes with the largest are hidden.

        Returns:
            Embeddings of the nodes that the contexts are of, [B, width]. With chance: features
            restored of the first half of the batch, [B / 2, N, F], where they were hidden, [B /
            2, N], and means by the walk, [B, width].
        """
        if chance is None:
            visible = torch.arange(x.shape[1], device=x.device).expand(
                len(x), -1
            )
            real = mask
        else:
            visible, real = visible_nodes(chance, mask, self.masked)
        share = weight.gather(1, visible) * real
        features = self.embedding(x.gather(1, _expanded(visible, x)))
        is_center = (visible == 0)[..., None]
        y = features + self.rank(scaled(share)) + self.own * is_center
        for block in self.encoder:
            y = block(y, real)
        y = self.norm(y)
        mean_weight = (share / share.sum(1, keepdim=True))[..., None]
        mean = (y * mean_weight).sum(1)
        if chance is None:
            return y[:, 0]

        # The second half of the batch are contexts of neighbours: the contrast compares their
        # means, and only the first half is restored.
        half = len(x) // 2
        visible = visible[:half]
        mask = mask[:half]
        is_padding = mask.gather(1, visible) & ~real[:half]
        hidden = mask.scatter(1, visible, is_padding)
        restored = self.decoded(y[:half], visible, hidden, mask, weight[:half])
        return restored, hidden, mean

    def decoded(
        self,
        y: Tensor,
        visible: Tensor,
        hidden: Tensor,
        mask: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Returns features of all nodes, [B, N, F], from embeddings of the visible
        ones, [B, S, width].
        """
        mask_tokens = self.mask_token.to(y.dtype).expand(*mask.shape, -1)
        embeddings = self.bridge(y).to(y.dtype)
        tokens = mask_tokens.scatter(1, _expanded(visible, y), embeddings)
        # The encoder read some hidden nodes to fill its rows; the decoder must not see them.
        tokens = torch.where(hidden[..., None], mask_tokens, tokens)
        tokens = tokens + self.decoder_rank(scaled(weight))
        for block in self.decoder:
            tokens = block(tokens, mask)
        restored: Tensor = self.restore(tokens)
        return restored


def visible_nodes(
    chance: Tensor, mask: Tensor, masked: float
) -> tuple[Tensor, Tensor]:
    """Returns which nodes of every context the encoder reads: all except a share of the real ones,
    at least one.

    Args:
        chance: uniform numbers, [B, N].
        mask: which nodes are real, [B, N].
        masked: the share that is hidden.

    Returns:
        Numbers of nodes [B, S], and which of them are visible, [B, S]; the others fill up.
    """
    # Padding gets a number above every chance, so that it comes last.
    ranked = chance.masked_fill(~mask, 2).argsort(1)
    most = math.ceil(mask.shape[1] * (1 - masked))
    order = ranked[:, :most]
    count = (mask.sum(1, keepdim=True) * (1 - masked)).ceil()
    return order, torch.arange(most, device=mask.device) < count


def scaled(weight: Tensor) -> Tensor:
    """Returns weights [...] on a logarithmic scale, as inputs of a layer: [..., 1]."""
    return weight.clamp(min=1e-6).log10()[..., None] + 2


def _expanded(index: Tensor, like: Tensor) -> Tensor:
    """Returns an index of nodes [B, S], repeated over the last dimension of a tensor."""
    return index[..., None].expand(-1, -1, like.shape[-1])


class Pgt(GradientLearner):
    """Restores hidden features, and distinguishes the neighbour of a node from those of others."""

    module: ContextTransformer

    def build(
        self,
        config: PgtConfig,
        shapes: Mapping[str, tuple[int, ...]],
        context: Context,
    ) -> nn.Module:
        """Encoder and decoder for features of the source's width."""
        return ContextTransformer(shapes["x"][-1], config)

    def blocks(self) -> Sequence[nn.Module]:
        """Returns the blocks of the encoder, then of the decoder."""
        return [*self.module.encoder, *self.module.decoder]

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Returns the random numbers that hide nodes of both contexts, [B, 2, N]."""
        rows, nodes = batch["mask"].shape
        return {
            "chance": torch.rand(
                rows, 2, nodes, generator=generator, device=generator.device
            )
        }

    def loss(self, batch: Batch, noise: Batch, progress: Progress) -> Loss:
        """Returns the mean over hidden nodes of (1 - cosine)^2, plus InfoNCE.

        Both are multiplied by the number of contexts.
        """
        # One forward pass encodes the contexts of the nodes and those of their neighbours.
        inputs = (
            torch.cat([batch[name], batch["neighbour"][name]])
            for name in CONTEXT
        )
        chance = noise["chance"].transpose(0, 1).flatten(0, 1)
        restored, hidden, mean = self.slots.forward(*inputs, chance)
        rows = len(batch["x"])

        similarity = F.cosine_similarity(restored, batch["x"], dim=-1)
        errors = (1 - similarity).square() * hidden
        # A context of one node has nothing to hide.
        restoration = errors.sum() / hidden.sum().clamp(min=1)
        contrast = info_nce(mean[:rows], mean[rows:], self.config.temperature)

        losses = {"restoration": restoration, "contrast": contrast}
        means = {
            name: Mean(value.detach() * rows, rows)
            for name, value in losses.items()
        }
        total = restoration + self.config.contrast * contrast
        return Loss(total * rows, rows, means)

    def inputs(self, batch: Batch) -> Any:
        """Returns the contexts of the nodes."""
        return {name: batch[name] for name in CONTEXT}

    @torch.no_grad()
    def predict(self, inputs: Any) -> Tensor:
        """Returns the embeddings, [B, width]."""
        with self.evaluating():
            embedding: Tensor = self.slots.forward(
                *(inputs[name] for name in CONTEXT)
            )
        return embedding


def info_nce(anchors: Tensor, positives: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of identifying the positive of each anchor by cosine (van den Oord et al.,
    arXiv:1807.03748).

    Args:
        anchors: embeddings, [B, width].
        positives: the embedding that belongs to each of them, [B, width].
        temperature: divisor of the similarities.

    Returns:
        The mean, a scalar.
    """
    similarity = F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).T
    labels = torch.arange(len(anchors), device=anchors.device)
    return F.cross_entropy(similarity / temperature, labels)
