"""Rendering whose backward pass renders again, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .ray_batch import RayBatch

RenderChunk = Callable[..., Tensor]


def render_and_replay(
    render_chunk: RenderChunk, chunks: Sequence[RayBatch], parameters: Sequence[Tensor]
) -> Tensor:
    """Renders without a gradient now, and again in the backward pass, one chunk at a time.

    Args:
        render_chunk: Renders one chunk. It may not draw random numbers.
        chunks: The rays.
        parameters: Leaves that need a gradient.

    Returns:
        Colours [B, R, 3]. Their gradient reaches the parameters alone.
    """
    colour: Tensor = _Replay.apply(render_chunk, chunks, *parameters)  # type: ignore[no-untyped-call]
    return colour


class _Replay(torch.autograd.Function):
    """Takes parameters as inputs, so that autograd computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        render_chunk: RenderChunk,
        chunks: Sequence[RayBatch],
        *parameters: Tensor,
    ) -> Tensor:
        # Autograd runs this without a gradient, so activations are freed with each chunk.
        ctx.render_chunk = render_chunk
        ctx.chunks = chunks
        ctx.parameters = parameters
        return torch.cat([render_chunk(*chunk) for chunk in chunks], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [chunk.direction.shape[1] for chunk in ctx.chunks]
        pieces = torch.split(gradients[0], sizes, 1)
        totals: list[Tensor | None] = [None] * len(ctx.parameters)
        # Autograd starts with the chunk that was rendered last. The same order gives the same bits.
        pairs = [*zip(ctx.chunks, pieces, strict=True)]
        for chunk, piece in reversed(pairs):
            with torch.enable_grad():
                colour = ctx.render_chunk(*chunk)
            slopes = torch.autograd.grad(
                colour, ctx.parameters, piece, allow_unused=True
            )
            totals = [
                _added(total, slope)
                for total, slope in zip(totals, slopes, strict=True)
            ]
        return None, None, *totals


def _added(total: Tensor | None, slope: Tensor | None) -> Tensor | None:
    """Returns the sum of two gradients. None counts as zero."""
    if total is None or slope is None:
        return slope if total is None else total
    return total + slope
