"""Measures a cache of hand points whose key is a pose, as a hash or as its numbers.

python experiments/refused/pose_cache.py
"""

import torch
from recording import Figure, record
from torch import Tensor

GRASPS = 1024
BATCH = 64
UPDATES = 500
POINTS = 256
BOUND = 1000
"""Entries of a bounded cache."""
NUMBERS = 25
"""Numbers of a pose: translation, joints and rotation."""


def hand_points(pose: Tensor, template: Tensor) -> Tensor:
    """Returns points that depend on all numbers of a pose, [points, 3] in metres."""
    return torch.tanh(template @ pose).view(POINTS, 3)


def training_poses(poses: Tensor, turned: bool) -> list[Tensor]:
    """Returns the poses of one batch, each a separate tensor; turned ones differ in every draw."""
    batch = poses[torch.randint(GRASPS, (BATCH,))]
    if turned:
        angle = 2 * torch.pi * torch.rand(BATCH, 1)
        x, y = batch[:, :1], batch[:, 1:2]
        turned_xy = torch.cat([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], 1)
        batch = torch.cat([turned_xy, batch[:, 2:]], 1)
    return [pose.clone() for pose in batch]


def key_of(pose: Tensor, kind: str) -> object:
    """Returns the key of a pose in the cache."""
    if kind in ("hash", "bounded"):
        return hash(pose)
    digits = pose if kind == "numbers" else (pose * 20).round()
    return digits.numpy().tobytes()


def train(kind: str, turned: bool) -> tuple[int, int, int, float]:
    """Returns hits, wrong hits, bytes in the cache and the largest error of a point in metres."""
    torch.manual_seed(0)
    template = torch.randn(3 * POINTS, NUMBERS) / NUMBERS
    poses = torch.rand(GRASPS, NUMBERS) * 2 - 1
    cache: dict[object, Tensor] = {}
    hits = 0
    wrong = 0
    largest_error = 0.0
    for _ in range(UPDATES):
        for pose in training_poses(poses, turned):
            key = key_of(pose, kind)
            truth = hand_points(pose, template)
            if key not in cache:
                cache[key] = truth
                if kind == "bounded" and len(cache) > BOUND:
                    del cache[next(iter(cache))]
                continue
            hits += 1
            error = (cache[key] - truth).abs().max().item()
            wrong += error > 1e-6
            largest_error = max(largest_error, error)
    return hits, wrong, sum(points.nbytes for points in cache.values()), largest_error


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    draws = BATCH * UPDATES
    method = f"{draws:,} poses drawn from {GRASPS:,}"
    figures = []
    for kind, turned, label in (
        ("hash", False, "key hash(pose)"),
        ("bounded", False, f"key hash(pose), {BOUND:,} entries at most"),
        ("numbers", True, "key: all numbers, poses turned at random"),
        ("rounded", True, "key: numbers rounded to 0.05, poses turned"),
        ("numbers", False, "key: all numbers, poses never changed"),
    ):
        hits, wrong, size, error = train(kind, turned)
        share = 100 * hits / draws
        text = f"{share:.0f} % hits"
        if wrong:
            text += f" ({100 * wrong / hits:.0f} % wrong, up to {1000 * error:.0f} mm)"
        text += f", {size / 2**20:.0f} MiB"
        name = f"{kind}_{'turned' if turned else 'fixed'}"
        figures.append(Figure(name, label, share, "% hits", None, text, method))
    conclusion = (
        "Grasps are turned at random in every draw, so that no pose returns and the cache only grows. hash(pose) is "
        "the address of a tensor: equal poses miss, and a hit is another pose."
    )
    record("pose_cache", "A cache of hands by their pose", conclusion, figures)


if __name__ == "__main__":
    main()
