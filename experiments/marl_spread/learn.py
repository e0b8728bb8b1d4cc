"""Trains ``marl_spread`` with three seeds and draws the curve against a uniformly random policy.

python experiments/marl_spread/learn.py
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from curves import train  # noqa: E402

from runner.plugin.registry import Registry  # noqa: E402
from runner.recipe.loader import load  # noqa: E402
from runner.train.assemble import assemble  # noqa: E402

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
    steps = sorted(runs[SEEDS[0]]["curve"])
    rows = [[run["curve"][step]["return"] for run in runs.values()] for step in steps]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(steps, [statistics.median(row) for row in rows], label="multi-agent SAC, median of 3 seeds")
    axis.fill_between(steps, [min(row) for row in rows], [max(row) for row in rows], alpha=0.2, lw=0)
    axis.axhline(baseline, color="black", ls="--", label="uniformly random actions")
    axis.set(xlabel="environment steps", ylabel="return, mean over agents", title="mpe2.simple_spread_v3")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(HERE / "curve.png", dpi=110)
    print(f"random {baseline:.1f}; trained", " ".join(f"{value:.1f}" for value in rows[-1]))


if __name__ == "__main__":
    main()
