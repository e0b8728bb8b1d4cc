"""Compares torch's fused attention with attention that is written out, for short sequences.

python experiments/refused/fused_attention.py
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from recording import Figure, record, speed
from torch import Tensor
from torch.nn import functional

from runner.system.plots import BLUE, draw_png, legend

BATCH = 16
HEADS = 4
WIDTH = 32
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
CLAIMED = {"time": (2, 4), "memory": (5, 8)}
"""Ranges that the report claims."""
PLOT = "Speed of fused attention and memory of written attention by length, next to the claimed ranges"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention as products and a softmax, [B, heads, N, width]."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def step(attention: Attention, inputs: list[Tensor]) -> None:
    """Computes attention and its gradients."""
    for tensor in inputs:
        tensor.grad = None
    attention(*inputs).sum().backward()


def saved_bytes(attention: Attention, inputs: list[Tensor]) -> int:
    """Returns the bytes that autograd keeps for the backward pass, each storage once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*inputs)
    return sum(sizes.values())


def main() -> None:
    """Measures and records."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fused = functional.scaled_dot_product_attention
    figures = []
    for length in LENGTHS:
        batch = max(1, min(BATCH, 1024 // length))
        inputs = [torch.randn(batch, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
        label = f"{length} tokens"
        torch.testing.assert_close(fused(*inputs), written(*inputs), rtol=1e-4, atol=1e-5)
        baseline = partial(step, written, inputs)
        changed = partial(step, fused, inputs)
        figures.append(speed(f"time_{length}", label, baseline, changed))
        factor = saved_bytes(written, inputs) / saved_bytes(fused, inputs)
        method = "bytes kept for the backward pass, written / fused, exact"
        text = f"{factor:.1f} times if written out"
        figures.append(Figure(f"memory_{length}", label, factor, "times", None, text, method))
    conclusion = (
        "Fused attention saves what is quadratic in the length, which is little for the 16 to 128 tokens of "
        "grasps. All learners here use it; there is no stage."
    )
    draw_png(partial(draw_curves, figures), (7.0, 2.6), Path(__file__).with_suffix(".png"))
    record("fused_attention", "Written attention", conclusion, figures, PLOT)


def draw_curves(figures: list[Figure], canvas: Any) -> None:
    """Draws speed and memory by length."""
    titles = {"time": "times as fast", "memory": "memory if written out, times"}
    for axes, (quantity, title) in zip(canvas.subplots(1, 2), titles.items(), strict=True):
        chosen = [figure for figure in figures if figure.name.startswith(quantity)]
        values = [figure.value for figure in chosen]
        axes.axhspan(*CLAIMED[quantity], color="#e0e0e0", label="claimed")
        axes.plot(LENGTHS, values, "o-", color=BLUE, label="measured")
        for length, figure in zip(LENGTHS, chosen, strict=True):
            if figure.interval is not None:
                axes.plot([length, length], figure.interval, color=BLUE, linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        axes.minorticks_off()
        axes.set_xlabel("tokens")
        axes.set_title(title)
    legend(canvas)


if __name__ == "__main__":
    main()
