"""Trains ``marl_spread`` with three seeds and draws the curve against a uniformly random policy.

python experiments/marl_spread/learn.py
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import report  # noqa: E402
from curves import train  # noqa: E402

from runner.plugin.registry import Registry  # noqa: E402
from runner.recipe.loader import load  # noqa: E402
from runner.training.pipeline import assemble  # noqa: E402

SEEDS = (1, 2, 3)


class RandomPolicy:
    """Uniformly random actions."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(0)

    def predict(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(observation), *self.shape, generator=self.generator) * 2 - 1


def random_return() -> float:
    """Return of random actions on the same held-out episodes."""
    source = assemble(load("marl_spread", ["device=cpu"], Registry())).source
    return source.evaluate(RandomPolicy(source.shapes["action"]))["return"]


def main() -> None:
    runs = {seed: train("marl_spread", [f"seed={seed}", "tracking.system_metrics=false"]) for seed in SEEDS}
    baseline = random_return()
    (HERE / "results.json").write_text(json.dumps({"random_return": baseline, "runs": runs}, indent=1))
    report.main()


if __name__ == "__main__":
    main()
