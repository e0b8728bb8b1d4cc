"""Which settings does the flagship learn faster with? Four fractional factorial designs.

    python experiments/marl_learning/factors.py

Sixteen trainings each; main effects are told apart from one another, and from interactions of two. The first two begin
at what the recipe had, the others where those before them led.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from factorial import Point, Settings, effects, trained, two_levels  # noqa: E402

RECIPE = {"model.gamma": 0.95, "model.tau": 0.01, "optimizer.critic.lr": 3e-3}  # what it had before


class Design(NamedTuple):
    """What is compared, and with what."""

    low: Settings
    high: Settings
    products: tuple[tuple[int, ...], ...]
    seed: int
    gamma: float = RECIPE["model.gamma"]  # where it is not compared
    env_steps: int = 20_000

    def points(self) -> list[Point]:
        """All trainings."""
        return two_levels(self.low, self.high, self.products, self.seed)


EIGHT = ((1, 2, 3), (0, 2, 3), (0, 1, 2), (0, 1, 3))  # of which of the first four factors the last four are products
DESIGNS = (
    Design(
        {**RECIPE, "optimizer.actor.lr": 1e-3, "optimizer.temperature.lr": 3e-4, "max_grad_norm": 1,
         "model.target_entropy": -0.5, "data.warmup": 1000},
        {"model.gamma": 0.98, "model.tau": 0.03, "optimizer.critic.lr": 1e-3, "optimizer.actor.lr": 3e-4,
         "optimizer.temperature.lr": 3e-3, "max_grad_norm": 10, "model.target_entropy": -2, "data.warmup": 4000},
        EIGHT, 500,
    ),
    Design(
        {**RECIPE, "optimizer.actor.lr": 1e-3, "optimizer.temperature.lr": 3e-4, "data.replay.kind": "prioritized",
         "model.target_entropy": -0.5, "data.warmup": 1000},
        {"model.gamma": 0.98, "model.tau": 0.03, "optimizer.critic.lr": 6e-3, "optimizer.actor.lr": 3e-4,
         "optimizer.temperature.lr": 3e-3, "data.replay.kind": "uniform", "model.target_entropy": -2,
         "data.warmup": 300},
        EIGHT, 600,
    ),
    Design(
        {"model.gamma": 0.98, "model.tau": 0.01, "optimizer.critic.lr": 3e-3, "optimizer.temperature.lr": 3e-4,
         "data.warmup": 1000},
        {"model.gamma": 0.99, "model.tau": 0.03, "optimizer.critic.lr": 6e-3, "optimizer.temperature.lr": 3e-3,
         "data.warmup": 2000},
        ((0, 1, 2, 3),), 700,
    ),
    Design(
        {"model.tau": 0.03, "optimizer.critic.lr": 6e-3, "optimizer.actor.lr": 1e-3, "optimizer.temperature.lr": 3e-4},
        {"model.tau": 0.06, "optimizer.critic.lr": 1e-2, "optimizer.actor.lr": 2e-3, "optimizer.temperature.lr": 3e-3},
        (), 800, 0.98, 16_000,
    ),
)  # fmt: skip


def main() -> None:
    results = []
    for design in DESIGNS:
        fixed = [f"{name}={value}" for name, value in {**RECIPE, "model.gamma": design.gamma}.items()]
        length = [f"train.{name}={design.env_steps}" for name in ("env_steps", "checkpoint_every")]
        rows = trained(str(HERE / "before.yaml"), design.points(), [*fixed, *length, "train.evaluate_every=2000"])
        effects(rows, design.low, design.high, design.env_steps // 2)
        results.append(rows)
    (HERE / "factors.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
