"""Attention among the nodes of each graph in a batch, without padding."""

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
        """Creates the layers; ``width`` should be a multiple of the number of heads."""
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
        head_width = width // self.heads
        projected = self.qkv(x).view(batch, nodes, 3, self.heads, head_width)
        q, k, v = projected.permute(2, 0, 3, 1, 4)

        attend = (
            linear_attention if self.kind == "linear" else softmax_attention
        )
        gathered = attend(q, k, v, mask).transpose(1, 2)
        out: Tensor = self.out(gathered.reshape(batch, nodes, width))
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
    # On a CPU, the backward pass of bfloat16 attention is slower than that of float32.
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
            tensor if tensor.dtype == torch.float64 else tensor.float()
            for tensor in (q, k, v)
        )
        q = F.elu(q) + 1
        k = (F.elu(k) + 1) * mask[:, None, :, None]
        # The product of keys and values comes first: it has the size of a head, and the cost
        # grows with the number of nodes instead of its square.
        denominator = q @ k.sum(2).unsqueeze(-1)
        numerator = q @ (k.transpose(2, 3) @ v)
        # A graph without real nodes would divide zero by zero.
        smallest = torch.finfo(q.dtype).tiny
        return numerator / denominator.clamp(min=smallest)
