"""Plots of an ablation: ratios by variant, time of a training by activity, and time by size of
the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from runner.ablation.analysis import CaseResult, Result, VariantResult
from runner.proof.ratios import Effect, Ratio, noise_factor
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
from runner.system.text_lines import figure as format_figure
from runner.verify.variants import ALL, BASELINE

PLOT_TITLES = {
    "ratios.png": "Speed-up of every variant over the baseline, with 95 % intervals, noise and "
    "verdicts",
    "training.png": "Time of a training step by activity, for every variant",
    "scaling.png": "Time of an update against its arithmetic, over the cases",
}
"""Alternative texts of the plots, by file."""
_COLOURS = {"draw": ORANGE, "transfer": GREEN, "update": BLUE, "other": GREY}
_EFFECT_COLOURS = {"faster": BLUE, "slower": VERMILLION, "unclear": GREY}
_VISIBLE = 0.002
"""Smallest visible share of a bar."""
_INCHES_PER_ROW = 0.32
_INCHES_PER_RATIO = 0.24


@dataclass(frozen=True)
class _Quantity:
    """A measured time whose ratios have panels of their own."""

    label: str
    ratio: Callable[[VariantResult], Ratio]
    effect: Callable[[VariantResult], Effect]
    a_a: Callable[[CaseResult], Ratio]


_UPDATE = _Quantity(
    "speed-up of an update",
    attrgetter("ratio"),
    attrgetter("effect"),
    attrgetter("a_a"),
)
_TRAINING_STEP = _Quantity(
    "speed-up of a training step, by which a variant is recommended",
    attrgetter("training_ratio"),
    attrgetter("training_effect"),
    attrgetter("training_a_a"),
)


def draw(result: Result, folder: Path) -> list[str]:
    """Draws the plots as PNG files.

    Returns:
        Names of the files; none if matplotlib is not installed.
    """
    rows = len({variant.name for case in result.cases for variant in case.variants})
    width = 2.0 + 5.2 * len(result.cases)
    height = _INCHES_PER_ROW * rows
    pictures = {}
    if any(_is_compared(variant) for case in result.cases for variant in case.variants):
        panels = len(_quantities(result))
        size = width, 1.0 + (0.8 + _INCHES_PER_RATIO * rows) * panels
        pictures["ratios"] = (partial(_ratios, result), size)
    if any(variant.throughput for case in result.cases for variant in case.variants):
        pictures["training"] = (partial(_training, result), (width, 1.8 + height))
    if result.slope is not None:
        pictures["scaling"] = (partial(_scaling, result), (6.5, 5.0))
    return [path.name for path in draw_all(pictures, folder)]


def _quantities(result: Result) -> list[_Quantity]:
    """Returns the quantities that were measured: updates, and training steps if there are any."""
    variants = [variant for case in result.cases for variant in case.variants]
    has_training = any(
        variant.throughput and _is_compared(variant) for variant in variants
    )
    return [_UPDATE, _TRAINING_STEP] if has_training else [_UPDATE]


def _panels(
    result: Result,
    all_axes: Any,
    rows: Sequence[str],
    ratios: Callable[[CaseResult], Iterable[Ratio]],
) -> Any:
    """Prepares a panel for every case: its title, and the same rows from top to bottom."""
    for axes, case in zip(all_axes, result.cases, strict=True):
        measured = list(ratios(case))
        counts = {
            unit: sorted({getattr(ratio, unit) for ratio in measured})
            for unit in ("processes", "rounds")
        }
        spans = [
            f"{' to '.join(map(str, sorted({numbers[0], numbers[-1]})))} {unit}"
            for unit, numbers in counts.items()
            if numbers not in ([], [1])
        ]
        axes.set_title(
            ": ".join(filter(None, (case.name or result.name, ", ".join(spans))))
        )
        axes.grid(visible=False, axis="y")
        axes.set(
            yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5)
        )
    return zip(all_axes, result.cases, strict=True)


def _ratios(result: Result, figure: Any) -> None:
    """Draws every ratio with its interval: the colour shows the effect, the marker the verdict,
    the band the noise.
    """
    variants = [v for case in result.cases for v in case.variants if _is_compared(v)]
    rows = list(dict.fromkeys(variant.name for variant in variants))
    quantities = _quantities(result)
    # A common scale, so that ratios of several cases can be compared.
    shape = len(quantities), len(result.cases)
    grid = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    for line, quantity in zip(grid, quantities, strict=True):
        for axes, case in _panels(result, line, rows, partial(_measured, quantity)):
            band = noise_factor(quantity.a_a(case))
            label = "noise: the baseline against itself (A/A)"
            axes.axvspan(1 / band, band, color="#dddddd", zorder=0, label=label)
            axes.axvline(1, color=BLACK, linewidth=0.8)
            for variant in _drawable(quantity, case):
                _draw_ratio(axes, rows.index(variant.name), variant, quantity)
            axes.set_xlabel(f"{quantity.label} (bar: 95 % interval)")
            axes.tick_params(labelbottom=True)
    if len(quantities) > 1:
        _mark_recommended(result, grid[-1], rows)
    legend(figure)


def _drawable(quantity: _Quantity, case: CaseResult) -> list[VariantResult]:
    """Returns the variants of a case that have a ratio of this quantity."""
    measured = [v for v in case.variants if _is_compared(v) and not v.caught]
    if quantity is _TRAINING_STEP:
        return [variant for variant in measured if variant.throughput]
    return measured


def _is_compared(variant: VariantResult) -> bool:
    """Returns whether a variant has a ratio, which the baseline has not."""
    return variant.name != BASELINE


def _measured(quantity: _Quantity, case: CaseResult) -> list[Ratio]:
    """Returns the ratios of a quantity in a case."""
    return [quantity.ratio(variant) for variant in _drawable(quantity, case)]


def _mark_recommended(result: Result, panels: Any, rows: Sequence[str]) -> None:
    """Prints the name of the recommended variant of each case in its panel in bold."""
    for axes, recommendation in zip(panels, result.recommendations, strict=False):
        if recommendation.variant in rows:
            point = (1, rows.index(recommendation.variant))
            coordinates = ("axes fraction", "data")
            how = {"xycoords": coordinates, "va": "top", "fontweight": "bold"}
            _write(axes, "recommended", point, (4, -5), **how)


def _draw_ratio(
    axes: Any, row: int, variant: VariantResult, quantity: _Quantity
) -> None:
    """Draws the ratio of one variant, and writes it with the verdict next to the panel."""
    ratio = quantity.ratio(variant)
    effect = str(quantity.effect(variant))
    colour = _EFFECT_COLOURS[effect]
    verdict, marker = VERDICT_MARKERS[variant.verdict]
    bar = {"color": colour, "linewidth": 2.5, "solid_capstyle": "butt", "label": effect}
    axes.plot([ratio.low, ratio.high], [row, row], **bar)
    axes.plot(
        ratio.value, row, linestyle="none", color=colour, **({"markersize": 6} | marker)
    )
    # The legend shows the marker in black, because its colour has another meaning.
    axes.plot(
        [],
        [],
        linestyle="none",
        color=BLACK,
        label=verdict,
        **({"markersize": 6} | marker),
    )
    side = {"xycoords": ("axes fraction", "data"), "va": "center"}
    _write(axes, f"{ratio} {verdict}", (1, row), (4, 0), **side)
    if variant.published is not None and quantity is _UPDATE:
        diamond = {
            "color": BLACK,
            "fillstyle": "none",
            "markersize": 5,
            "label": "published",
        }
        axes.plot(variant.published, row, "D", **diamond)
        alignment = {"ha": "center", "va": "top"}
        _write(
            axes,
            f"{variant.published:g}",
            (variant.published, row),
            (0, -5),
            **alignment,
        )


def _training(result: Result, figure: Any) -> None:
    """Draws the time of a complete training per unit of its length, by activity."""
    rows = list(
        dict.fromkeys(
            v.name for case in result.cases for v in case.variants if v.throughput
        )
    )
    throughputs = [
        throughput
        for case in result.cases
        for variant in case.variants
        if (throughput := variant.throughput)
    ]
    largest = {
        activity: max(
            throughput.shares.get(activity, 0.0) for throughput in throughputs
        )
        for throughput in throughputs
        for activity in throughput.shares
    }
    # Activities of the source differ between variants, and tiny ones would fill the legend.
    visible = [activity for activity, share in largest.items() if share >= _VISIBLE]
    colours = colours_by_name(visible, _COLOURS)
    longest = max(1e3 / throughput.per_second for throughput in throughputs)
    shape = 1, len(result.cases)
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)[0]
    for axes, case in _panels(result, panels, rows, partial(_measured, _TRAINING_STEP)):
        for variant, throughput in (
            (variant, throughput)
            for variant in case.variants
            if (throughput := variant.throughput)
        ):
            row = rows.index(variant.name)
            total_ms = 1e3 / throughput.per_second
            offset = 0.0
            for activity, colour in colours.items():
                width = throughput.shares.get(activity, 0.0) * total_ms
                axes.barh(row, width, left=offset, color=colour, label=activity)
                offset += width
            _write(
                axes, format_figure(total_ms, 3), (total_ms, row), (3, 0), va="center"
            )
        unit = case.unit.removesuffix("s").replace("_", " ")
        axes.set(xlabel=f"training time per {unit} (ms)", xlim=(0, 1.15 * longest))
    legend(figure)


def _scaling(result: Result, figure: Any) -> None:
    """Time of an update against its least arithmetic, over the cases."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes = figure.subplots()
    cases = sorted(result.cases, key=lambda case: case.cost.least_flop)
    flop = [case.cost.least_flop / 1e9 for case in cases]
    whole_ms = [
        math.nan if (variant := case.named(ALL)) is None else variant.steady_ms
        for case in cases
    ]
    lines = {
        "baseline": ("o-", GREY, [case.baseline_ms for case in cases]),
        "all stages": ("s-", BLUE, whole_ms),
        "limit of this machine": ("^--", BLACK, [case.limit_ms for case in cases]),
    }
    for label, (mark, colour, milliseconds) in lines.items():
        axes.plot(flop, milliseconds, mark, color=colour, label=label, markersize=5)
        for point in zip(flop, milliseconds, strict=True):
            _write(axes, format_figure(point[1], 3), point, (0, 5), ha="center")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="minimal GFLOP of an update",
        ylabel="time of an update (ms)",
    )
    axes.set_xticks(
        flop,
        [f"{gflop:.3g}\n{case.name}" for gflop, case in zip(flop, cases, strict=True)],
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.margins(0.15)
    legend(figure)


def _write(
    axes: Any,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    **options: Any,
) -> None:
    axes.annotate(
        text,
        point,
        offset,
        textcoords="offset points",
        annotation_clip=False,
        fontsize=7,
        **options,
    )
