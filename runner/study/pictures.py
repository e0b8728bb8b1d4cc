"""Pictures of a study: how it went, the Pareto front, what decides, and every setting against every objective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.study.config import short
from runner.system.plots import BLACK, BLUE, GREY, VERMILLION, draw_all, legend

if TYPE_CHECKING:
    from runner.study.summary import Row, Summary

_WIDTH, _SLICE_WIDTH = 4.8, 3.2  # inches: on a phone, too, the writing of one can be read
_MARKS: Mapping[str, Mapping[str, Any]] = {
    "trial": {"marker": "o", "color": BLUE, "markersize": 4.5},
    "not counted": {"marker": "x", "color": GREY, "markersize": 5},
    "recipe as it is": {"marker": "D", "color": BLACK, "markersize": 8, "fillstyle": "none"},
    "best": {"marker": "*", "color": VERMILLION, "markersize": 9},
}
"""By what became of a trial: what is best is drawn last, so that nothing hides it."""
_STRIP = 0.4  # of the room of a choice, over which its trials are spread from the first to the last
SLICE = "slice-"
"""Prefix of the names of plots of one setting."""


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Draws what there is to see, as PNG: nothing if matplotlib is not installed, or nothing has a value yet."""
    rows = [row for row in summary.rows if row.values]
    if not rows:
        return []
    high = 1.6 * len(summary.objectives)
    pictures: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
        "progress": (partial(_progress, summary), (_WIDTH, high + 0.9))
    }
    if len(summary.objectives) > 1:
        pictures["front"] = (partial(_front, summary), (_WIDTH, 3.6))
    if summary.importance:
        bars = sum(map(len, summary.importance.values()))
        pictures["importance"] = (
            partial(_importance, summary),
            (_WIDTH, 0.5 + 0.5 * len(summary.importance) + 0.2 * bars),
        )
    for path in dict.fromkeys(path for row in rows for path in row.settings):
        name = f"{SLICE}{short(path)}".replace("/", "_")
        pictures[name] = (partial(_slice, summary, path), (_SLICE_WIDTH, high + 0.9))
    return draw_all(pictures, folder)


def _progress(summary: Summary, canvas: Any) -> None:
    counting = [row for row in summary.rows if row.cause == "done"]
    without = [row.number for row in summary.rows if not row.values and row.state in ("PRUNED", "FAIL")]
    panels = _panels(summary, canvas, "trial")
    for axes, (name, direction) in zip(panels, summary.objectives.items(), strict=True):
        best = itertools.accumulate((row.values[name] for row in counting), max if direction == "maximize" else min)
        so_far = [(row.number, value) for row, value in zip(counting, best, strict=True)]
        axes.step(*_columns(so_far), where="post", color=BLACK, linewidth=0.8, label="best so far")
        _points(axes, summary, ((row.number, row.values[name], row) for row in summary.rows if row.values))
        if without:
            low = axes.get_xaxis_transform()  # a height as a share of the panel's
            axes.plot(without, [0.06] * len(without), "v", color=GREY, markersize=4, transform=low, label="no value")
        axes.xaxis.get_major_locator().set_params(integer=True)
    legend(canvas)


def _front(summary: Summary, canvas: Any) -> None:
    axes = canvas.subplots()
    one, other = list(summary.objectives)[:2]
    front = sorted((row.values[one], row.values[other]) for row in summary.best)
    # Steps, because no trial is known to reach a value between two others.
    side: Literal["pre", "post"] = "pre" if summary.objectives[one] == "maximize" else "post"
    axes.step(*_columns(front), where=side, color=VERMILLION, linewidth=0.8)
    _points(axes, summary, ((row.values[one], row.values[other], row) for row in summary.rows if row.values))
    for place in dict.fromkeys(front):
        there = [row.number for row in summary.best if (row.values[one], row.values[other]) == place]
        text = ", ".join(map(str, sorted(there)))  # trials with equal settings are equal
        axes.annotate(text, place, (5, 4), textcoords="offset points", annotation_clip=False)
    canvas.suptitle(_title(summary), fontsize=8)
    axes.set(xlabel=_wanted(summary, one), ylabel=_wanted(summary, other))
    axes.margins(0.1)
    legend(canvas)


def _importance(summary: Summary, canvas: Any) -> None:
    lengths = [len(shares) for shares in summary.importance.values()]
    panels = canvas.subplots(len(lengths), 1, squeeze=False, sharex=True, height_ratios=lengths)[:, 0]
    counting = sum(row.cause == "done" for row in summary.rows)
    for axes, (name, shares) in zip(panels, summary.importance.items(), strict=True):
        bars = axes.barh([short(path) for path in shares], [100 * share for share in shares.values()], color=BLUE)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=7)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(title=name, xlim=(0, 100))
    panels[-1].set_xlabel(f"share of the importance by {counting} trials (PED-ANOVA), %")


def _slice(summary: Summary, path: str, canvas: Any) -> None:
    """Draws one setting against every objective; an objective has the same scale for all
    settings.
    """
    tried = [row for row in summary.rows if row.values and path in row.settings]
    settings = [row.settings[path] for row in tried]
    numbers = all(isinstance(setting, int | float) and not isinstance(setting, bool) for setting in settings)
    places: Sequence[float] = settings if numbers else _strip([str(setting) for setting in settings])
    panels = _panels(summary, canvas, short(path), len(tried))
    for axes, name in zip(panels, summary.objectives, strict=True):
        _points(axes, summary, ((at, row.values[name], row) for at, row in zip(places, tried, strict=True)))
        low, *_, high = sorted(row.values[name] for row in summary.rows if row.values) * 2
        if math.isfinite(high - low) and low < high:
            axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
        if numbers and path in summary.logarithmic:
            axes.set_xscale("log", subs=())
            axes.xaxis.get_major_locator().set_params(subs=(1, 3) if max(settings) < 1e3 * min(settings) else (1,))
            axes.xaxis.set_major_formatter("{x:g}")
        if not numbers:
            choices = sorted(set(map(str, settings)))
            axes.set(xticks=range(len(choices)), xticklabels=choices, xlim=(-0.5, len(choices) - 0.5))
    legend(canvas)


def _strip(choices: Sequence[str]) -> list[float]:
    """Returns x positions of trials above their choices: side by side in order,
    so that none hides another.
    """
    places = sorted(set(choices))  # in the same order in every plot
    found = []
    for number, choice in enumerate(choices):
        before, of = choices[:number].count(choice), choices.count(choice)
        found.append(places.index(choice) + _STRIP * ((before + 0.5) / of - 0.5))
    return found


def _panels(summary: Summary, canvas: Any, below: str, trials: int | None = None) -> Sequence[Any]:
    """A panel for every objective, one below the other."""
    panels: Sequence[Any] = canvas.subplots(len(summary.objectives), 1, squeeze=False, sharex=True)[:, 0]
    canvas.suptitle(_title(summary, trials), fontsize=8)
    panels[-1].set_xlabel(below)
    for axes, name in zip(panels, summary.objectives, strict=True):
        axes.set_title(_wanted(summary, name), loc="left")
        axes.margins(0.08)
    return panels


def _title(summary: Summary, trials: int | None = None) -> str:
    with_value = sum(bool(row.values) for row in summary.rows) if trials is None else trials
    seeds = f", each the mean of {summary.seeds} seeds" if summary.seeds > 1 else ", one seed each"
    return f"{with_value} trials with a value{seeds}"


def _wanted(summary: Summary, name: str) -> str:
    return f"{name} {'↑' if summary.objectives[name] == 'maximize' else '↓'}"


def _points(axes: Any, summary: Summary, points: Iterable[tuple[float, float, Row]]) -> None:
    """Draws trials by what became of them."""
    places: dict[str, list[tuple[float, float]]] = {label: [] for label in _MARKS}
    for x, y, row in points:
        places["best" if row.best else "trial" if row.cause == "done" else "not counted"].append((x, y))
        if row.is_recipe:
            places["recipe as it is"].append((x, y))
    for label, found in places.items():
        if found:
            told = "Pareto front" if label == "best" and len(summary.objectives) > 1 else label
            axes.plot(*_columns(found), linestyle="none", label=told, **_MARKS[label])


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[Sequence[float], Sequence[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
