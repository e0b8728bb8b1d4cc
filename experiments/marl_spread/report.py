"""Draws ``results.json`` and prints where its curves end.

python experiments/marl_spread/report.py
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from runner.system.plots import BLACK, BLUE, GREY, draw_all, legend

HERE = Path(__file__).parent


def main() -> None:
    results = json.loads((HERE / "results.json").read_text())
    draw_all({"curve": (partial(draw, results), (6.0, 3.6))}, HERE)
    last = (run["curve"][max(run["curve"], key=int)]["return"] for run in results["runs"].values())
    print(f"random {results['random_return']:.1f}; trained", " ".join(f"{value:.1f}" for value in last))


def draw(results: dict[str, Any], canvas: Any) -> None:
    """Every seed, and their median with the range, beside uniformly random actions."""
    axis, baseline = canvas.subplots(), results["random_return"]
    curves = [{int(step): row["return"] for step, row in run["curve"].items()} for run in results["runs"].values()]
    steps = sorted(curves[0])
    rows = [[curve[step] for curve in curves] for step in steps]
    low, middle, high = ([of(row) for row in rows] for of in (min, statistics.median, max))
    for curve in curves:
        axis.plot(steps, [curve[step] for step in steps], color=GREY, linewidth=0.7, label="one seed")
    axis.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0, label="from the worst to the best seed")
    axis.plot(steps, middle, "o-", color=BLUE, markersize=3, label=f"median of {len(curves)} seeds")
    axis.axhline(baseline, color=BLACK, linestyle="--", label=f"uniformly random actions: {baseline:.1f}")
    axis.annotate(f"{middle[-1]:.1f}", (steps[-1], middle[-1]), (4, 0), textcoords="offset points", va="center")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="environment steps", ylabel="return, mean over agents", title="mpe2.simple_spread_v3")
    legend(canvas)


if __name__ == "__main__":
    main()
