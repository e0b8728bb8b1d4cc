"""Draws ``results.json`` and prints its table, beside the figures of the UAV_PATH_PLANNING repository's own logs.

python experiments/marl_learning/report.py
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from runner.system.plots import BLUE, GREEN, ORANGE, PURPLE, VERMILLION, draw_all, legend

HERE = Path(__file__).parent
COLUMNS = ("success_rate", "steps_to_goal", "formation_rate", "formation_strict")
TITLES = ("success rate", "steps to the goal", "formation rate, mean over followers", "formation rate, all followers")
MARKS = ((BLUE, "o-"), (ORANGE, "s-"), (GREEN, "^-"), (VERMILLION, "x--"), (PURPLE, "D-"))
"""Colour and mark of every variant, in the order of their names."""
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

    draw_all({"curves": (partial(draw, results), (9.0, 6.4))}, HERE)


def draw(results: dict[str, Any], canvas: Any) -> None:
    """The median of every variant with the range over its seeds; rates are on one scale."""
    axes = canvas.subplots(2, 2, sharex=True)
    for axis, column, title in zip(axes.flat, COLUMNS, TITLES, strict=True):
        for (variant, runs), (colour, mark) in zip(sorted(results.items()), MARKS, strict=True):
            rows = [{int(step): row[column] for step, row in run["curve"].items()} for run in runs.values()]
            steps = sorted(rows[0])
            values = [[row[step] for row in rows] for step in steps]
            low, middle, high = ([of(each) for each in values] for of in (min, statistics.median, max))
            label = f"{variant}, {len(runs)} seeds"
            axis.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
            axis.plot(steps, middle, mark, color=colour, markersize=4, label=label)
        axis.set_title(title)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        if column == "steps_to_goal":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.set_ylim(-0.03, 1.03)
            axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axis in axes[1]:
        axis.set_xlabel("environment steps")
    canvas.suptitle("line: median over seeds; shade: from the worst to the best seed; 500 held-out episodes")
    legend(canvas)


def spread(values: list[float], name: str) -> str:
    """The median, and the range in brackets."""
    form = "{:.1f}" if name == "steps_to_goal" else "{:.1%}"
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} [{low}, {high}]"


if __name__ == "__main__":
    main()
