"""Pictures of an ablation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.measure.result import CaseResult, Result

HINT = "No plots: matplotlib is not installed here (pip install 'proven-runner[plots]')."
_COLOURS = {"draw": "#66ccee", "transfer": "#ccbb44", "update": "#ee6677", "other": "#bbbbbb"}
_SOURCE_COLOURS = ("#4477aa", "#228833", "#aa3377")
"""For what a source does apart."""
"""Told apart also by those who see few colours (Paul Tol's bright scheme)."""
_FASTER, _SLOWER, _UNCLEAR = "#228833", "#aa3377", "#888888"
_INCH_A_ROW = 0.32


def draw(result: Result, folder: Path) -> list[str]:
    """Draws what there is to see, as PNG.

    Args:
        result: what came out.
        folder: where to.

    Returns:
        The names of the files; none if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []

    pictures: dict[str, Callable[[Any], None]] = {"ratios.png": lambda figure: _ratios(result, figure)}
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training.png"] = lambda figure: _training(result, figure)
    if result.slope is not None:
        pictures["scaling.png"] = lambda figure: _scaling(result, figure)
    rows = max(len(case.variants) for case in result.cases)
    for name, picture in pictures.items():
        is_square = name == "scaling.png"
        height = 5.0 if is_square else 1.8 + _INCH_A_ROW * rows
        width = 6.5 if is_square else 2.5 + 5.0 * len(result.cases)
        figure = Figure(figsize=(width, height), layout="constrained")
        picture(figure)
        figure.savefig(folder / name, dpi=130)
    return list(pictures)


def _ratios(result: Result, figure: Any) -> None:
    """The ratio of every variant with its interval; what A/A reaches is shaded."""
    for axes, case in zip(_side_by_side(figure, len(result.cases)), result.cases, strict=True):
        variants = [variant for variant in case.variants if variant.stages]
        for row, variant in enumerate(variants):
            ratio = variant.ratio
            colour = {"faster": _FASTER, "slower": _SLOWER}.get(str(variant.effect), _UNCLEAR)
            axes.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot(ratio.value, row, "o", color=colour, markersize=5)
            axes.annotate(f"{ratio.value:.2f}x", (ratio.high, row), (6, 0), textcoords="offset points", va="center",
                          fontsize=8)  # fmt: skip
            if variant.published is not None:
                axes.plot(variant.published, row, "D", color="black", fillstyle="none", markersize=6)
        spread = case.a_a.spread
        axes.axvspan(1 / spread, spread, color="#dddddd", zorder=0)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        _rows(axes, [variant.name for variant in variants])
        axes.set_xlabel("times as fast as the baseline (95 % interval; grey: A/A; diamond: published)", fontsize=8)
        axes.set_title(case.name or result.name, fontsize=10)


def _training(result: Result, figure: Any) -> None:
    """Time of one step of a whole training, by what it is spent on."""
    for axes, case in zip(_side_by_side(figure, len(result.cases)), result.cases, strict=True):
        measured = [(v.name, v.throughput) for v in case.variants if v.throughput is not None]
        left = [0.0] * len(measured)
        activities = list(dict.fromkeys(activity for _, t in measured for activity in t.shares))
        colours = dict(zip((each for each in activities if each not in _COLOURS), cycle(_SOURCE_COLOURS), strict=False))
        for activity in activities:
            colour = _COLOURS.get(activity) or colours[activity]
            widths = [1e3 * t.shares.get(activity, 0.0) / t.per_second for _, t in measured]
            axes.barh(range(len(measured)), widths, left=left, color=colour, label=activity)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _rows(axes, [name for name, _ in measured])
        axes.set_xlabel("milliseconds a step of a whole training", fontsize=8)
        axes.set_title(case.name or result.name, fontsize=10)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    lines: dict[str, list[float]] = {
        "baseline": [case.baseline_ms for case in cases],
        "all stages": [_whole(case) for case in cases],
        "limit": [case.limit_ms for case in cases],
    }
    for (name, values), style in zip(lines.items(), ("o-", "s-", "k--"), strict=True):
        axes.plot(flop, values, style, label=name, markersize=5)
    for x, y, case in zip(flop, lines["baseline"], cases, strict=True):
        axes.annotate(case.name, (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("least GFLOP of an update")
    axes.set_ylabel("ms an update")
    axes.legend()


def _whole(case: CaseResult) -> float:
    variant = case.named("all")
    return float("nan") if variant is None else variant.steady_ms


def _side_by_side(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])


def _rows(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
