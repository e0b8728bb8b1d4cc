"""Attention among the nodes of each graph in a batch, which padding takes no part in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

Kind = Literal["softmax", "linear"]


class Attention(nn.Module):
    """Multi-head attention with one layer for queries, keys and values, as
    ``torch.nn.MultiheadAttention`` has it.

    The kinds are different functions of the same parameters: ``softmax`` takes time that grows
    with the square of the number of nodes, ``linear`` time that grows with their number.
    """

    def __init__(self, width: int, heads: int, kind: Kind = "softmax") -> None:
        """Heads share the width among them; it should be a multiple of their number."""
        super().__init__()
        self.heads = heads
        self.kind = kind
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns what every node collects from the real nodes.

        Args:
            x: nodes [B, N, width].
            mask: which nodes are real, [B, N]; what comes out for others means nothing.

        Returns:
            [B, N, width].
        """
        batch, nodes, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, nodes, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        gathered = (linear_attention if self.kind == "linear" else softmax_attention)(
            q, k, v, mask
        )
        out: Tensor = self.out(gathered.transpose(1, 2).reshape(batch, nodes, width))
        return out


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of Vaswani et al. 2017 (arXiv:1706.03762).

    Args:
        q: queries [B, H, N, width of a head].
        k: keys, like the queries.
        v: values, like the queries.
        mask: which keys are real, [B, N].

    Returns:
        [B, H, N, width of a head].
    """
    allowed = mask[:, None, None, :]
    # Its backward is slower there than float32's.
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), attn_mask=allowed
            )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """phi(q) (sum phi(k) v^T) / (phi(q) . sum phi(k)) with phi = elu + 1 (Katharopoulos et al.
    2020, arXiv:2006.16236).

    Args and what it returns are those of ``softmax_attention``; it returns float32, or float64
    for float64.
    """
    # Sums over nodes lose small summands in 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (
            each if each.dtype == torch.float64 else each.float() for each in (q, k, v)
        )
        q = F.elu(q) + 1
        k = (F.elu(k) + 1) * mask[:, None, :, None]
        denominator = q @ k.sum(2).unsqueeze(-1)
        return (
            q
            @ (k.transpose(2, 3) @ v)
            / denominator.clamp(min=torch.finfo(q.dtype).tiny)
        )
