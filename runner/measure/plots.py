"""Pictures of an ablation."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.measure.analysis import CaseResult, Result

_COLOURS = {"draw": "#66ccee", "transfer": "#ccbb44", "update": "#ee6677", "other": "#bbbbbb"}
"""Told apart also by those who see few colours (Paul Tol's bright scheme)."""
_SOURCE_COLOURS = ("#4477aa", "#228833", "#aa3377")
"""For what a source does apart."""
_EFFECT_COLOURS = {"faster": "#228833", "slower": "#aa3377", "inconclusive": "#888888"}
_INCH_A_ROW = 0.32


def draw(result: Result, folder: Path) -> list[str]:
    """Draws what there is to see, as PNG.

    Returns:
        The names of the files; none if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    wide = 2.5 + 5.0 * len(result.cases), 1.8 + _INCH_A_ROW * max(len(case.variants) for case in result.cases)
    pictures = {"ratios.png": (_ratios, wide)}
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training.png"] = (_training, wide)
    if result.slope is not None:
        pictures["scaling.png"] = (_scaling, (6.5, 5.0))
    for name, (picture, size) in pictures.items():
        figure = Figure(figsize=size, layout="constrained")
        picture(result, figure)
        figure.savefig(folder / name, dpi=130)
    return list(pictures)


def _ratios(result: Result, figure: Any) -> None:
    """The ratio of every variant with its interval; what A/A reaches is shaded."""
    for axes, case in zip(figure.subplots(1, len(result.cases), squeeze=False)[0], result.cases, strict=True):
        variants = [variant for variant in case.variants if variant.stages]
        for row, variant in enumerate(variants):
            ratio, colour = variant.ratio, _EFFECT_COLOURS[variant.effect]
            axes.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(ratio.value, row, "o", color=colour, markersize=5)
            axes.annotate(f"{ratio.value:.2f}x", (ratio.high, row), (6, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
            if variant.published is not None:
                axes.plot(variant.published, row, "D", color="black", fillstyle="none", markersize=6)
        axes.axvspan(1 / case.a_a.spread, case.a_a.spread, color="#dddddd", zorder=0)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        label = "times as fast as the baseline (95 % interval; grey: A/A; diamond: published)"
        _label(axes, [variant.name for variant in variants], label, case.name or result.name)


def _training(result: Result, figure: Any) -> None:
    """Time of one step of a whole training, by what it is spent on."""
    for axes, case in zip(figure.subplots(1, len(result.cases), squeeze=False)[0], result.cases, strict=True):
        measured = [(v.name, v.throughput) for v in case.variants if v.throughput is not None]
        left = [0.0] * len(measured)
        source_colours = cycle(_SOURCE_COLOURS)
        for activity in dict.fromkeys(activity for _, own in measured for activity in own.shares):
            colour = _COLOURS.get(activity) or next(source_colours)
            widths = [1e3 * own.shares.get(activity, 0.0) / own.per_second for _, own in measured]
            axes.barh(range(len(measured)), widths, left=left, color=colour, label=activity)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _label(
            axes, [name for name, _ in measured], "milliseconds a step of a whole training", case.name or result.name
        )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)


def _label(axes: Any, rows: list[str], below: str, title: str) -> None:
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(below, fontsize=8)
    axes.set_title(title, fontsize=10)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    axes.plot(flop, [case.baseline_ms for case in cases], "o-", label="baseline", markersize=5)
    axes.plot(flop, [_whole_ms(case) for case in cases], "s-", label="all stages", markersize=5)
    axes.plot(flop, [case.limit_ms for case in cases], "k--", label="limit")
    for x, case in zip(flop, cases, strict=True):
        axes.annotate(case.name, (x, case.baseline_ms), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("least GFLOP of an update")
    axes.set_ylabel("ms an update")
    axes.legend()


def _whole_ms(case: CaseResult) -> float:
    whole = case.named("all")
    return math.nan if whole is None else whole.steady_ms
