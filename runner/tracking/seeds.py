"""Runs of one recipe that differ only in their seed: their records and their combined results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runner.recipe.recipe import Recipe
from runner.system.interval import Interval, student
from runner.system.plots import BLUE, GREY, draw_all, legend
from runner.tracking.lookup import below, folders
from runner.tracking.record import Record
from runner.tracking.spool import lines
from runner.tracking.workspace import RunFolder, Workspace

PICTURE = "curves"
_SEED: Mapping[str, Any] = {"color": GREY, "linewidth": 0.7, "markersize": 3}
_PANEL = (4.0, 3.0)  # inches
_PANELS = 4
TEST = "test/"
"""Prefix of the metrics of the test part, which have one value at the end of a run."""

Bounds = Mapping[str, tuple[float, float]]
"""Smallest and largest possible value of metrics, by pattern."""
Curves = dict[str, dict[int, dict[int, float]]]
"""Values by metric, seed and step."""


def groups(workspace: Workspace) -> list[Record]:
    """Returns all readable groups of a workspace, the newest first."""
    records = (folder.record() for folder in folders(workspace.seeds))
    return [record for record in records if record is not None]


def runs_of(workspace: Workspace, group: Record) -> dict[int, RunFolder]:
    """Returns the group's runs that have started, by seed; the newest of several
    with the same seed.
    """
    seeds = {digest: seed for seed, digest in group.digests.items()}
    runs: dict[int, RunFolder] = {}
    # The newest comes first, so that it stays.
    for folder in below(workspace, group.name):
        record = folder.record()
        if record is not None and record.digest in seeds:
            runs.setdefault(seeds[record.digest], folder)
    return dict(sorted(runs.items()))


def is_finished(folder: RunFolder) -> bool:
    """Returns whether a run has finished; others have values of earlier steps."""
    record = folder.record()
    return record is not None and record.status == "FINISHED"


def evaluations(runs: Mapping[int, RunFolder]) -> Curves:
    """Returns the metrics of evaluations without ``eval/``, and those of tests with ``test/``."""
    curves: Curves = {}
    for seed, folder in runs.items():
        for line, _ in lines(folder.spool):
            for name, value in line.metrics.items():
                if not name.startswith(("eval/", TEST)):
                    continue
                by_seed = curves.setdefault(name.removeprefix("eval/"), {})
                by_seed.setdefault(seed, {})[line.step] = value
    return curves


def logged_name(name: str) -> str:
    """Returns the name under which a run logs a metric of ``evaluations``."""
    return name if name.startswith(TEST) else f"eval/{name}"


def last(curves: Curves) -> dict[str, dict[int, float]]:
    """The last value of every metric, by seed."""
    last_values = {}
    for name, by_seed in curves.items():
        last_values[name] = {seed: values[max(values)] for seed, values in by_seed.items()}
    return last_values


def bounds_of(recipe: Recipe) -> Bounds:
    """Returns the bounds of evaluation metrics that the recipe's plugins declare."""
    bounds = {**recipe.model.bounds, **recipe.data.bounds}
    if recipe.objective is not None and recipe.objective.unit == "share":
        bounds[recipe.objective.name] = (0.0, 1.0)
    return bounds


def bounds_for(name: str, bounds: Bounds) -> tuple[float, float]:
    """Returns the smallest and the largest possible value of a metric, also of one of the test."""
    evaluated = name.removeprefix(TEST)
    matching = (limits for pattern, limits in bounds.items() if fnmatchcase(evaluated, pattern))
    return next(matching, (-math.inf, math.inf))


def overlap(folds: int) -> float:
    """Returns the factor by which the interval of a cross-validation is wider than Student's.

    The trainings share most of their samples, so their results are no independent repetitions. The
    variance of their mean is estimated as (1 / k + 1 / (k - 1)) times that of a result (Nadeau and
    Bengio 2003), instead of 1 / k times.
    """
    return math.sqrt((2 * folds - 1) / (folds - 1))


def widening(group: Record) -> float:
    """Returns the factor of the width of a group's intervals."""
    return overlap(len(group.digests)) if group.kind == "folds" else 1.0


def means(curves: Curves, count: int, bounds: Bounds, widening: float = 1.0) -> Iterator[tuple[str, int, Interval]]:
    """Yields metrics, the steps at which all seeds were evaluated, and the means there, which are
    NaN where a value is not finite.

    Args:
        curves: Values by metric, seed and step.
        count: Number of seeds.
        bounds: Smallest and largest possible value of metrics, by pattern. No interval exceeds them.
        widening: Factor of the width of intervals.
    """
    for name, by_seed in curves.items():
        if len(by_seed) != count:
            continue
        common_steps = set.intersection(*map(set, by_seed.values()))
        for step in sorted(common_steps):
            interval = student([values[step] for values in by_seed.values()]).widened(widening)
            yield name, step, interval.clipped(*bounds_for(name, bounds))


def final_means(
    curves: Curves, count: int, bounds: Bounds, widening: float = 1.0
) -> Iterator[tuple[str, int, Interval]]:
    """Yields metrics of finished trainings that ended at different steps, the largest step, and the
    mean of the last values.

    Args:
        curves: Values by metric, seed and step.
        count: Number of seeds.
        bounds: As for ``means``.
        widening: As for ``means``.
    """
    for name, by_seed in curves.items():
        steps = {max(values) for values in by_seed.values()}
        if len(by_seed) == count and len(steps) > 1:
            interval = student([values[max(values)] for values in by_seed.values()]).widened(widening)
            yield name, max(steps), interval.clipped(*bounds_for(name, bounds))


def draw(
    curves: Curves,
    first: Sequence[str],
    unit: str,
    folder: Path,
    bounds: Bounds,
    label: str = "one seed",
    word: str = "seed",
    widening: float = 1.0,
) -> list[Path]:
    """Draws a few metrics over the training: every seed, and the mean with its 95 % interval.

    Args:
        curves: Values by metric, seed and step.
        first: Metrics to draw before all others.
        unit: What steps count.
        folder: Where the plot is written.
        bounds: Smallest and largest possible value of metrics, by pattern.
        label: Of the curve of one run.
        word: What the runs differ in: seed or fold.
        widening: As for ``means``.
    """
    ordered_names = dict.fromkeys([*first, *sorted(curves)])
    # A single value is no curve.
    drawn_metrics = [name for name in ordered_names if name in curves and not name.startswith(TEST)]
    drawn_metrics = [name for name in drawn_metrics if _has_finite_value(curves[name])][:_PANELS]
    if not drawn_metrics:
        return []
    steps: set[int] = set()
    for name in drawn_metrics:
        steps.update(*curves[name].values())

    def picture(canvas: Any) -> None:
        panels = canvas.subplots(1, len(drawn_metrics), squeeze=False, sharex=True)[0]
        for axes, name in zip(panels, drawn_metrics, strict=True):
            _draw_metric(
                axes,
                name,
                curves[name],
                bounds,
                label,
                word,
                widening,
            )
            axes.set_xlabel(unit.replace("_", " "))
            axes.xaxis.set_major_locator(_locator(steps))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        legend(canvas)

    size = (_PANEL[0] * len(drawn_metrics), _PANEL[1])
    return draw_all({PICTURE: (picture, size)}, folder)


def _draw_metric(
    axes: Any,
    name: str,
    by_seed: Mapping[int, Mapping[int, float]],
    bounds: Bounds,
    label: str,
    word: str,
    widening: float,
) -> None:
    """Draws a curve for every seed, and the means of several."""
    for values in by_seed.values():
        axes.plot(*zip(*sorted(values.items()), strict=True), ".-", **_SEED, label=label)
    if len(by_seed) == 1:
        axes.set_title(name)
        return
    # Seeds may share no step yet.
    curves = {name: {seed: dict(values) for seed, values in by_seed.items()}}
    intervals = [(step, *interval) for _, step, interval in means(curves, len(by_seed), bounds, widening)]
    _draw_means(axes, intervals, word)
    axes.set_title(f"{name}, {len(by_seed)} {word}s")


def _has_finite_value(by_seed: Mapping[int, Mapping[int, float]]) -> bool:
    return any(math.isfinite(value) for values in by_seed.values() for value in values.values())


def _locator(steps: Collection[int]) -> Any:
    """Returns the positions of numbers at the axis of steps: a scale would repeat the number of a single step."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    if len(steps) == 1:
        return FixedLocator([*steps])
    return MaxNLocator(nbins=6, integer=True)


def _draw_means(axes: Any, intervals: Sequence[tuple[int, float, float, float]], word: str) -> None:
    """Draws the means at shared steps with their intervals: as a band, or as a bar at a single step."""
    if not intervals:
        return
    steps, middle, low, high = zip(*intervals, strict=True)
    if len(intervals) == 1:
        axes.plot(
            steps * 2,
            [*low, *high],
            color=BLUE,
            alpha=0.4,
            linewidth=4,
            label="its 95 % interval",
        )
    else:
        axes.fill_between(
            steps,
            low,
            high,
            color=BLUE,
            alpha=0.2,
            linewidth=0,
            label="its 95 % interval",
        )
    axes.plot(
        steps,
        middle,
        "o-",
        color=BLUE,
        markersize=3,
        label=f"mean of the {word}s",
    )
