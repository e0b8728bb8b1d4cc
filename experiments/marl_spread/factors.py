"""Which settings does ``marl_spread`` learn faster with? A fractional factorial design, and what each factor is worth.

    python experiments/marl_spread/factors.py

Sixteen trainings with a seed each tell the main effects of six settings apart from one another (resolution IV: each is
mixed up with interactions of three, which are taken for nothing); eight more look further along the two that matter.
"""

import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from factorial import Point, effects, trained, two_levels  # noqa: E402

START = {
    "optimizer.critic.lr": 1e-3,
    "max_grad_norm": 1,
    "optimizer.temperature.lr": 1e-2,
    "data.replay.kind": "uniform",
    "optimizer.actor.lr": 1e-3,
    "model.tau": 0.01,
}
OTHER = {
    "optimizer.critic.lr": 3e-3,
    "max_grad_norm": 5,
    "optimizer.temperature.lr": 3e-2,
    "data.replay.kind": "prioritized",
    "optimizer.actor.lr": 5e-4,
    "model.tau": 0.02,
}
FURTHER = {"optimizer.critic.lr": 6e-3, "model.tau": 0.04}
STAGES = ("amp.dtype=bf16", "compile=on", "float32_matmul=on", "fused_optimizer=on", "heap_retention=on")
LAST = 50_000  # and the two evaluations after it


def design() -> list[Point]:
    """All trainings."""
    points = two_levels(START, OTHER, [(0, 1, 2), (1, 2, 3)], 100)
    for i, (*levels, _) in enumerate(itertools.product((0, 1), repeat=3)):
        further = {name: (OTHER, FURTHER)[level][name] for name, level in zip(FURTHER, levels, strict=True)}
        points.append(Point({**START, **further}, 200 + i))
    return points


def main() -> None:
    rows = trained("marl_spread", design(), [f"optimization.{stage}" for stage in STAGES])
    (HERE / "factors.json").write_text(json.dumps(rows, indent=1) + "\n")
    effects(rows[:16], START, OTHER, LAST)
    effects(rows[16:], OTHER, FURTHER, LAST)


if __name__ == "__main__":
    main()
