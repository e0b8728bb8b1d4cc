"""Plots of an ablation: ratios by variant, time of a training by activity, and time by size of the case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.compare.ratio import Ratio, noise_factor
from runner.measure.analysis import CaseResult, Result, VariantResult
from runner.system.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERDICT_MARKERS,
    VERMILLION,
    colours_by_name,
    draw_all,
    legend,
)
from runner.verify.variants import ALL

PLOT_TITLES = {
    "ratios.png": "Speed-up of every variant over the baseline, with 95 % intervals, noise and verdicts",
    "training.png": "Time of a training step by activity, for every variant",
    "scaling.png": "Time of an update against its arithmetic, over the cases",
}
"""Alternative texts of the plots, by file."""
_COLOURS = {"draw": ORANGE, "transfer": GREEN, "update": BLUE, "other": GREY}
_EFFECT_COLOURS = {"faster": BLUE, "slower": VERMILLION, "unclear": GREY}
_VISIBLE = 0.002
"""Smallest visible share of a bar."""
_INCHES_PER_ROW = 0.32


def draw(result: Result, folder: Path) -> list[str]:
    """Draws the plots as PNG files.

    Returns:
        Names of the files; none if matplotlib is not installed.
    """
    rows = len({variant.name for case in result.cases for variant in case.variants})
    wide = 2.0 + 5.2 * len(result.cases), 1.8 + _INCHES_PER_ROW * rows
    pictures = {}
    if any(variant.stages for case in result.cases for variant in case.variants):
        pictures["ratios"] = (partial(_ratios, result), wide)
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training"] = (partial(_training, result), wide)
    if result.slope is not None:
        pictures["scaling"] = (partial(_scaling, result), (6.5, 5.0))
    return [path.name for path in draw_all(pictures, folder)]


def _panels(result: Result, figure: Any, rows: Sequence[str], ratios: Callable[[CaseResult], Iterable[Ratio]]) -> Any:
    """A part of the figure for every case, side by side, on one scale and with the same rows from top to bottom."""
    every = figure.subplots(1, len(result.cases), squeeze=False, sharex=True, sharey=True)[0]
    for axes, case in zip(every, result.cases, strict=True):
        own = list(ratios(case))
        counts = {what: sorted({getattr(each, what) for each in own}) for what in ("processes", "rounds")}
        told = [
            f"{' to '.join(map(str, sorted({of[0], of[-1]})))} {what}"
            for what, of in counts.items()
            if of not in ([], [1])
        ]
        axes.set_title(": ".join(filter(None, (case.name or result.name, ", ".join(told)))))
        axes.grid(visible=False, axis="y")
        axes.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    return zip(every, result.cases, strict=True)


def _ratios(result: Result, figure: Any) -> None:
    """Draws every ratio with its interval: the colour shows the effect, the marker the verdict, the band the noise."""
    rows = list(dict.fromkeys(v.name for case in result.cases for v in case.variants if v.stages))
    for axes, case in _panels(result, figure, rows, lambda case: (v.ratio for v in case.variants if v.stages)):
        band = noise_factor(case.a_a)
        label = "noise: the baseline against itself (A/A)"
        axes.axvspan(1 / band, band, color="#dddddd", zorder=0, label=label)
        axes.axvline(1, color=BLACK, linewidth=0.8)
        for variant in case.variants:
            if variant.stages and not variant.caught:
                _draw_ratio(axes, rows.index(variant.name), variant)
        axes.set_xlabel("speed-up over the baseline (bar: 95 % interval)")
    legend(figure)


def _draw_ratio(axes: Any, row: int, variant: VariantResult) -> None:
    """Draws the ratio of one variant, and writes it with the verdict next to the panel."""
    ratio = variant.ratio
    colour = _EFFECT_COLOURS[variant.effect]
    verdict, marker = VERDICT_MARKERS[variant.verdict]
    bar = {"color": colour, "linewidth": 2.5, "solid_capstyle": "butt", "label": str(variant.effect)}
    axes.plot([ratio.low, ratio.high], [row, row], **bar)
    axes.plot(ratio.value, row, linestyle="none", color=colour, **({"markersize": 6} | marker))
    # The legend shows the marker in black, because its colour has another meaning.
    axes.plot([], [], linestyle="none", color=BLACK, label=verdict, **({"markersize": 6} | marker))
    _write(axes, f"{ratio} {verdict}", (1, row), (4, 0), xycoords=("axes fraction", "data"), va="center")
    if variant.published is not None:
        axes.plot(variant.published, row, "D", color=BLACK, fillstyle="none", markersize=5, label="published")
        _write(axes, f"{variant.published:g}", (variant.published, row), (0, -5), ha="center", va="top")


def _training(result: Result, figure: Any) -> None:
    """Draws the time of a complete training per unit of its length, by activity."""
    rows = list(dict.fromkeys(v.name for case in result.cases for v in case.variants if v.throughput))
    trained = [own for case in result.cases for variant in case.variants if (own := variant.throughput)]
    largest = {
        activity: max(own.shares.get(activity, 0.0) for own in trained) for each in trained for activity in each.shares
    }
    # A source may have activities besides those of every training.
    visible = [activity for activity, share in largest.items() if share >= _VISIBLE]
    colours = colours_by_name(visible, _COLOURS)
    longest = max(1e3 / own.per_second for own in trained)
    for axes, case in _panels(
        result, figure, rows, lambda case: (v.throughput.ratio for v in case.variants if v.throughput and v.stages)
    ):
        for variant, own in ((variant, own) for variant in case.variants if (own := variant.throughput)):
            row, whole = rows.index(variant.name), 1e3 / own.per_second
            left = 0.0
            for activity, colour in colours.items():
                width = own.shares.get(activity, 0.0) * whole
                axes.barh(row, width, left=left, color=colour, label=activity)
                left += width
            _write(axes, f"{whole:.3g}", (whole, row), (3, 0), va="center")
        unit = case.unit.removesuffix("s").replace("_", " ")
        axes.set(xlabel=f"training time per {unit} (ms)", xlim=(0, 1.15 * longest))
    legend(figure)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    whole_ms = [math.nan if (whole := case.named(ALL)) is None else whole.steady_ms for case in cases]
    lines = {
        "baseline": ("o-", GREY, [case.baseline_ms for case in cases]), "all stages": ("s-", BLUE, whole_ms),
        "limit of this machine": ("^--", BLACK, [case.limit_ms for case in cases]),
    }  # fmt: skip
    for label, (mark, colour, milliseconds) in lines.items():
        axes.plot(flop, milliseconds, mark, color=colour, label=label, markersize=5)
        for place in zip(flop, milliseconds, strict=True):
            _write(axes, f"{place[1]:.3g}", place, (0, 5), ha="center")
    axes.set(xscale="log", yscale="log", xlabel="minimal GFLOP of an update", ylabel="time of an update (ms)")
    axes.set_xticks(flop, [f"{each:.3g}\n{case.name}" for each, case in zip(flop, cases, strict=True)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.margins(0.15)
    legend(figure)


def _write(axes: Any, text: str, place: tuple[float, float], beside: tuple[float, float], **how: Any) -> None:
    axes.annotate(text, place, beside, textcoords="offset points", annotation_clip=False, fontsize=7, **how)
