"""Draws ``results.json`` and prints its table, beside the figures of the UAV_PATH_PLANNING repository's own logs.

python experiments/marl_learning/report.py
"""

import json
import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLUMNS = ("success_rate", "steps_to_goal", "formation_rate", "formation_strict")
TITLES = ("success rate", "steps to the goal", "formation rate, mean over followers", "formation rate, all followers")
LOGS = {
    1: (0.72, 29.5, 0.219, 0.219),
    2: (0.97, 46.4, 0.169, 0.051),
    3: (0.99, 29.7, 0.21, 0.026),
    4: (0.92, 57.5, 0.18, 0.01),
}
"""Success of 100 test episodes, steps and formation rates by number of followers (reward v0_2, 33k to 93k steps)."""


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    print("| variant | seeds | success | collisions | steps to the goal | formation mean | formation strict |")
    print("|---|---|---|---|---|---|---|")
    rows = [(variant, max(map(int, next(iter(runs.values()))["curve"]))) for variant, runs in sorted(results.items())]
    for variant, step in [*rows, ("3 followers, prioritized", 30_000)]:
        last = [
            row
            for run in results[variant].values()
            for at, row in run["curve"].items()
            if int(at) // 1000 == step // 1000
        ]
        cells = [
            spread([each[name] for each in last], name) for name in ("success_rate", "collision_rate", *COLUMNS[1:])
        ]
        print(f"| {variant}, {step // 1000} thousand steps | {len(last)} | {' | '.join(cells)} |")
    for followers, logged in LOGS.items():
        shown = [f"{logged[0]:.0%}", "", f"{logged[1]:.1f}", f"{logged[2]:.1%}", f"{logged[3]:.1%}"]
        print(f"| {followers} follower{'s' * (followers > 1)}, the repository's logs | 1 | {' | '.join(shown)} |")

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for axis, column, title in zip(axes.flat, COLUMNS, TITLES, strict=True):
        for colour, variant in enumerate(sorted(results)):
            runs = [{int(step): row[column] for step, row in run["curve"].items()} for run in results[variant].values()]
            steps = sorted(runs[0])
            rows = [[run[step] for run in runs] for step in steps]
            axis.plot(steps, [statistics.median(row) for row in rows], color=f"C{colour}", label=variant)
            axis.fill_between(
                steps, [min(r) for r in rows], [max(r) for r in rows], color=f"C{colour}", alpha=0.15, lw=0
            )
        axis.set_title(title)
        axis.grid(alpha=0.3)
        if column == "steps_to_goal":
            axis.set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("environment steps")
    axes[0, 0].legend(fontsize=8)
    figure.suptitle("Median over seeds, with the range; deterministic policy on 500 held-out episodes")
    figure.savefig(HERE / "curves.png", dpi=110)


def spread(values: list[float], name: str) -> str:
    """The median, and the range in brackets."""
    form = "{:.1f}" if name == "steps_to_goal" else "{:.1%}"
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} [{low}, {high}]"


if __name__ == "__main__":
    main()
