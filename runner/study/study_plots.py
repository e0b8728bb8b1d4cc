"""Pictures of a study: how it went, the Pareto front, what decides, and every setting against every objective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.study.space import short
from runner.system.plots import BLACK, BLUE, GREY, VERMILLION, draw_all, legend

if TYPE_CHECKING:
    from runner.study.summary import Row, Summary

# Inches, so that the text can be read on a phone, too.
_WIDTH = 4.8
_SLICE_WIDTH = 3.2
_MARKS: Mapping[str, Mapping[str, Any]] = {
    "trial": {"marker": "o", "color": BLUE, "markersize": 4.5},
    "not counted": {"marker": "x", "color": GREY, "markersize": 5},
    "recipe as it is": {"marker": "D", "color": BLACK, "markersize": 8, "fillstyle": "none"},
    "best": {"marker": "*", "color": VERMILLION, "markersize": 9},
}
"""By what became of a trial: what is best is drawn last, so that nothing hides it."""
# Share of the width of a choice over which its trials are spread, from the first to the last.
_STRIP = 0.4
# Margin of a panel, as a share of the range of values.
_MARGIN = 0.08
SLICE = "slice-"
"""Prefix of the names of plots of one setting."""


def draw(summary: Summary, folder: Path) -> list[Path]:
    """Draws what there is to see, as PNG: nothing if matplotlib is not installed, or nothing has a value yet."""
    rows = [row for row in summary.rows if row.values]
    if not rows:
        return []
    height = 1.6 * len(summary.objectives) + 0.9
    pictures: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
        "progress": (partial(_progress, summary), (_WIDTH, height))
    }
    if len(summary.objectives) > 1:
        pictures["front"] = (partial(_front, summary), (_WIDTH, 3.6))
    if summary.importance:
        bars = sum(map(len, summary.importance.values()))
        bars_height = 0.5 + 0.5 * len(summary.importance) + 0.2 * bars
        pictures["importance"] = (partial(_importance, summary), (_WIDTH, bars_height))
    for path in dict.fromkeys(path for row in rows for path in row.settings):
        name = f"{SLICE}{short(path)}".replace("/", "_")
        pictures[name] = (partial(_slice, summary, path), (_SLICE_WIDTH, height))
    return draw_all(pictures, folder)


def _progress(summary: Summary, canvas: Any) -> None:
    counting = [row for row in summary.rows if row.cause == "done"]
    without_value = [row.number for row in summary.rows if not row.values and row.state in ("PRUNED", "FAIL")]
    panels = _panels(summary, canvas, "trial")
    for axes, (name, direction) in zip(panels, summary.objectives.items(), strict=True):
        better = max if direction == "maximize" else min
        numbers = [row.number for row in counting]
        best_so_far = list(itertools.accumulate((row.values[name] for row in counting), better))
        axes.step(
            numbers,
            best_so_far,
            where="post",
            color=BLACK,
            linewidth=0.8,
            label="best so far",
        )
        points = ((row.number, row.values[name], row) for row in summary.rows if row.values)
        _points(axes, summary, points)
        if without_value:
            # Their height is a share of the panel's, because they have no value.
            transform = axes.get_xaxis_transform()
            heights = [0.06] * len(without_value)
            axes.plot(
                without_value,
                heights,
                "v",
                color=GREY,
                markersize=4,
                transform=transform,
                label="no value",
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
    legend(canvas)


def _front(summary: Summary, canvas: Any) -> None:
    axes = canvas.subplots()
    x_name, y_name = list(summary.objectives)[:2]

    def position(row: Row) -> tuple[float, float]:
        return row.values[x_name], row.values[y_name]

    front = sorted(map(position, summary.best))
    # Steps, because no trial is known to reach a value between two others.
    side: Literal["pre", "post"] = "pre" if summary.objectives[x_name] == "maximize" else "post"
    axes.step(
        *_columns(front),
        where=side,
        color=VERMILLION,
        linewidth=0.8,
    )
    points = ((*position(row), row) for row in summary.rows if row.values)
    _points(axes, summary, points)
    for point in dict.fromkeys(front):
        # Trials with equal settings are equal, so that several may be at one point.
        numbers = sorted(row.number for row in summary.best if position(row) == point)
        text = ", ".join(map(str, numbers))
        axes.annotate(
            text,
            point,
            (5, 4),
            textcoords="offset points",
            annotation_clip=False,
        )
    canvas.suptitle(_title(summary), fontsize=8)
    axes.set(xlabel=_label(summary, x_name), ylabel=_label(summary, y_name))
    axes.margins(0.1)
    legend(canvas)


def _importance(summary: Summary, canvas: Any) -> None:
    lengths = [len(shares) for shares in summary.importance.values()]
    grid = canvas.subplots(
        len(lengths),
        1,
        squeeze=False,
        sharex=True,
        height_ratios=lengths,
    )
    panels = grid[:, 0]
    counting = sum(row.cause == "done" for row in summary.rows)
    for axes, (name, shares) in zip(panels, summary.importance.items(), strict=True):
        labels = [short(path) for path in shares]
        percents = [100 * share for share in shares.values()]
        bars = axes.barh(labels, percents, color=BLUE)
        axes.bar_label(
            bars,
            fmt="%.0f %%",
            padding=3,
            fontsize=7,
        )
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
    are_numbers = all(map(_is_number, settings))
    positions: Sequence[float] = settings
    if not are_numbers:
        positions = _strip([str(setting) for setting in settings])
    panels = _panels(summary, canvas, short(path), len(tried))
    for axes, name in zip(panels, summary.objectives, strict=True):
        points = ((x, row.values[name], row) for x, row in zip(positions, tried, strict=True))
        _points(axes, summary, points)
        ordered_values = sorted(row.values[name] for row in summary.rows if row.values)
        low = ordered_values[0]
        high = ordered_values[-1]
        if math.isfinite(high - low) and low < high:
            margin = _MARGIN * (high - low)
            axes.set_ylim(low - margin, high + margin)
        if are_numbers and path in summary.logarithmic:
            axes.set_xscale("log", subs=())
            # More than three decades leave no room for ticks between their ends.
            is_narrow = max(settings) < 1e3 * min(settings)
            subdivisions = (1, 3) if is_narrow else (1,)
            axes.xaxis.get_major_locator().set_params(subs=subdivisions)
            axes.xaxis.set_major_formatter("{x:g}")
        if not are_numbers:
            choices = sorted(set(map(str, settings)))
            axes.set(
                xticks=range(len(choices)),
                xticklabels=choices,
                xlim=(-0.5, len(choices) - 0.5),
            )
    legend(canvas)


def _strip(choices: Sequence[str]) -> list[float]:
    """Returns x positions of trials above their choices: side by side in order,
    so that none hides another.
    """
    # Sorted, so that the order is the same in every plot.
    columns = sorted(set(choices))
    positions = []
    for number, choice in enumerate(choices):
        rank = choices[:number].count(choice)
        offset = (rank + 0.5) / choices.count(choice) - 0.5
        positions.append(columns.index(choice) + _STRIP * offset)
    return positions


def _is_number(setting: Any) -> bool:
    return isinstance(setting, int | float) and not isinstance(setting, bool)


def _panels(summary: Summary, canvas: Any, below: str, trials: int | None = None) -> Sequence[Any]:
    """A panel for every objective, one below the other."""
    grid = canvas.subplots(len(summary.objectives), 1, squeeze=False, sharex=True)
    panels: Sequence[Any] = grid[:, 0]
    canvas.suptitle(_title(summary, trials), fontsize=8)
    panels[-1].set_xlabel(below)
    for axes, name in zip(panels, summary.objectives, strict=True):
        axes.set_title(_label(summary, name), loc="left")
        axes.margins(_MARGIN)
    return panels


def _title(summary: Summary, trials: int | None = None) -> str:
    if trials is None:
        trials = sum(bool(row.values) for row in summary.rows)
    seeds = f", each the mean of {summary.seeds} seeds" if summary.seeds > 1 else ", one seed each"
    return f"{trials} trials with a value{seeds}"


def _label(summary: Summary, name: str) -> str:
    arrow = "↑" if summary.objectives[name] == "maximize" else "↓"
    return f"{name} {arrow}"


def _points(axes: Any, summary: Summary, points: Iterable[tuple[float, float, Row]]) -> None:
    """Draws trials by what became of them."""
    positions: dict[str, list[tuple[float, float]]] = {mark: [] for mark in _MARKS}
    for x, y, row in points:
        positions[_mark(row)].append((x, y))
        if row.is_recipe:
            positions["recipe as it is"].append((x, y))
    for mark, pairs in positions.items():
        if pairs:
            is_front = mark == "best" and len(summary.objectives) > 1
            label = "Pareto front" if is_front else mark
            axes.plot(
                *_columns(pairs),
                linestyle="none",
                label=label,
                **_MARKS[mark],
            )


def _mark(row: Row) -> str:
    if row.best:
        return "best"
    return "trial" if row.cause == "done" else "not counted"


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[Sequence[float], Sequence[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
