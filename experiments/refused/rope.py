"""Measures whether attention on a set of grasps keeps its invariance with rotary positions.

python experiments/refused/rope.py
"""

import torch
from recording import Figure, record
from torch import Tensor, nn
from torch.nn import functional

GRASPS = 16
WIDTH = 128
HEADS = 4
SEEDS = 20


def rotate(x: Tensor) -> Tensor:
    """Returns queries or keys, [heads, N, width], rotated by their positions (RoPE)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * frequency
    first = x[..., :half]
    second = x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def attend(layer: nn.Linear, x: Tensor, has_positions: bool) -> Tensor:
    """Returns the self-attention of a set, [N, width]."""
    q, k, v = layer(x).view(GRASPS, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3).unbind(0)
    if has_positions:
        q = rotate(q)
        k = rotate(k)
    return functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(GRASPS, WIDTH)


@torch.no_grad()
def difference(seed: int, has_positions: bool) -> float:
    """Returns the relative distance between permuted results and results of permuted grasps."""
    torch.manual_seed(seed)
    layer = nn.Linear(WIDTH, 3 * WIDTH)
    grasps = torch.randn(GRASPS, WIDTH)
    order = torch.randperm(GRASPS)
    expected = attend(layer, grasps, has_positions)[order]
    actual = attend(layer, grasps[order], has_positions)
    return float((actual - expected).norm() / expected.norm())


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    method = f"{SEEDS} networks and orders of {GRASPS} grasps: mean, smallest and largest"
    figures = []
    for name, has_positions in (("without", False), ("with", True)):
        differences = [difference(seed, has_positions) for seed in range(SEEDS)]
        mean = sum(differences) / SEEDS
        interval = (min(differences), max(differences))
        text = (
            f"{mean:.1e} off"
            if mean < 1e-3
            else f"{100 * mean:.0f} % off [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"
        )
        label = f"order changed, {name} RoPE"
        figures.append(Figure(name, label, mean, "relative", interval, text, method))
    conclusion = "Grasps of a scene have no order. With rotary positions, the answer for a grasp depends on its place."
    record("rope", "Rotary positions for sets", conclusion, figures)


if __name__ == "__main__":
    main()
