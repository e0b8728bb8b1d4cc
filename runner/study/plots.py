"""Pictures of a study."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.study.summary import Row, Summary

_OTHER, _BEST, _BAD = "#4477aa", "#228833", "#bbbbbb"
"""Told apart also by those who see few colours (Paul Tol's bright scheme)."""
_RECIPE = "#ee6677"


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Draws what there is to see, as PNG.

    Args:
        summary: of the study.
        folder: where to.

    Returns:
        The files; none if matplotlib is not installed, or nothing has a value yet.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []

    if not any(row.values for row in summary.rows):
        return []
    pictures: dict[str, Callable[[Summary, Any], None]] = {"progress": _progress}
    if len(summary.objectives) > 1:
        pictures["front"] = _front
    if summary.importance:
        pictures["importance"] = _importance
    files = []
    for name, picture in pictures.items():
        panels = len(summary.objectives) if name == "progress" else 1
        figure = Figure(figsize=(9.0, 2.6 * panels + 0.6) if name == "progress" else (7.5, 4.8), layout="constrained")
        picture(summary, figure)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def _progress(summary: Summary, figure: Any) -> None:
    """Every objective over the trials, with the best so far."""
    panels = figure.subplots(len(summary.objectives), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, direction) in zip(panels, summary.objectives.items(), strict=True):
        rows = [row for row in summary.rows if row.values]
        for row in rows:
            axes.plot(row.number, row.values[name], "o", color=_colour(row), markersize=6)
        counting = [row for row in rows if row.cause == "done"]
        best = max if direction == "maximize" else min
        reached = itertools.accumulate((row.values[name] for row in counting), best)
        axes.step([row.number for row in counting], list(reached), where="post", color="black", linewidth=0.8)
        without = [row.number for row in summary.rows if not row.values and row.state in ("PRUNED", "FAIL")]
        low, _ = axes.get_ylim()
        axes.plot(without, [low] * len(without), "x", color=_BAD, markersize=7)
        axes.set_ylabel(name, fontsize=8)
        axes.tick_params(labelsize=8)
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("trial (green: best; red: recipe as it is; line: best so far; cross: no value)", fontsize=8)


def _front(summary: Summary, figure: Any) -> None:
    """The first two objectives against each other."""
    axes = figure.subplots()
    one, other = list(summary.objectives)[:2]
    rows = [row for row in summary.rows if row.values]
    for row in sorted(rows, key=lambda row: row.best):
        axes.plot(row.values[one], row.values[other], "o", color=_colour(row), markersize=7 if row.best else 5)
        if row.best or row.is_recipe:
            label = f"{row.number}{' (recipe)' if row.is_recipe else ''}"
            axes.annotate(label, (row.values[one], row.values[other]), (5, 4), textcoords="offset points", fontsize=8)
    front = sorted((row.values[one], row.values[other]) for row in rows if row.best)
    if front:
        axes.plot(*zip(*front, strict=True), color=_BEST, linewidth=0.8)
    axes.set_xlabel(one)
    axes.set_ylabel(other)
    axes.set_title("Pareto front (green), the recipe as it is (red)", fontsize=10)
    axes.margins(0.1)


def _importance(summary: Summary, figure: Any) -> None:
    """How much every setting decides."""
    panels = figure.subplots(1, len(summary.importance), squeeze=False)[0]
    for axes, (name, shares) in zip(panels, summary.importance.items(), strict=True):
        paths = list(shares)[::-1]
        axes.barh([path.removeprefix("optimization.") for path in paths], [100 * shares[path] for path in paths],
                  color=_OTHER)  # fmt: skip
        axes.set_xlabel("%", fontsize=8)
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)


def _colour(row: Row) -> str:
    if row.is_recipe:
        return _RECIPE
    return _BEST if row.best else _OTHER if row.cause == "done" else _BAD
