"""Which settings does ``marl_spread`` learn faster with? A fractional factorial design, and what each factor is worth.

    python experiments/marl_spread/factors.py

Sixteen trainings with a seed each tell the main effects of six settings apart from one another (resolution IV: each is
mixed up with interactions of three, which are taken for nothing); eight more look further along the two that matter.
"""

import itertools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from curves import train  # noqa: E402

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
LAST = ("50000", "55000", "60000")


class Training(NamedTuple):
    """One point of the design."""

    settings: dict[str, float | str]
    seed: int

    def run(self) -> dict[str, object]:
        """Trains, evaluating 200 episodes every 5 thousand steps."""
        settings = dict(self.settings)
        norm = settings.pop("max_grad_norm")
        settings |= {f"optimizer.{role}.max_grad_norm": norm for role in ("actor", "critic")}
        sets = [f"{name}={value}" for name, value in settings.items()]
        sets += [f"optimization.{stage}" for stage in STAGES]
        sets += [f"seed={self.seed}", "device=cpu", "data.evaluation.episodes=200", "tracking.system_metrics=false"]
        curve = {str(step): metrics["return"] for step, metrics in train("marl_spread", sets)["curve"].items()}
        print(self, curve[LAST[-1]], flush=True)
        return {"settings": self.settings, "seed": self.seed, "curve": curve}


def design() -> list[Training]:
    """All trainings."""
    points = []
    for i, (a, b, c, d) in enumerate(itertools.product((0, 1), repeat=4)):
        levels = zip(START, (a, b, c, d, a ^ b ^ c, b ^ c ^ d), strict=True)
        points.append(Training({name: (START, OTHER)[level][name] for name, level in levels}, 100 + i))
    for i, (a, b, _) in enumerate(itertools.product((0, 1), repeat=3)):
        levels = zip(FURTHER, (a, b), strict=True)
        points.append(Training({**START, **{k: (OTHER, FURTHER)[level][k] for k, level in levels}}, 200 + i))
    return points


def effects(rows: list[dict[str, object]], first: dict[str, float | str], second: dict[str, float | str]) -> None:
    """Prints how the return of the last three evaluations differs between two levels, and the standard error."""
    for name in second:
        ends = [
            [statistics.mean(row["curve"][step] for step in LAST) for row in rows if row["settings"][name] == level]
            for level in (first[name], second[name])
        ]
        error = sum(statistics.variance(group) / len(group) for group in ends) ** 0.5
        gain = statistics.mean(ends[1]) - statistics.mean(ends[0])
        print(f"{name}: {first[name]} -> {second[name]}: {gain:+.2f} +- {error:.2f}")


def main() -> None:
    with ThreadPoolExecutor(2) as pairs:
        rows = list(pairs.map(Training.run, design()))
    (HERE / "factors.json").write_text(json.dumps(rows, indent=1) + "\n")
    effects(rows[:16], START, OTHER)
    effects(rows[16:], OTHER, FURTHER)


if __name__ == "__main__":
    main()
