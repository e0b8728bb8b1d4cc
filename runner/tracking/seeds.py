"""Runs of one recipe that differ only in their seed: their records and their combined results."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.system.interval import CONFIDENCE, Interval, student
from runner.system.plots import BLUE, GREY, draw_all, legend
from runner.tracking.record import Record
from runner.tracking.spool import lines
from runner.tracking.workspace import RunFolder, Workspace, below, find, folders

PICTURE = "curves"
_SEED: Mapping[str, Any] = {"color": GREY, "linewidth": 0.7, "markersize": 3}
_PANEL = (4.0, 3.0)  # inches
_PANELS = 4

Bounds = Mapping[str, tuple[float, float]]
"""Smallest and largest possible value of metrics, by pattern."""
Curves = dict[str, dict[int, dict[int, float]]]
"""Values by metric, seed and step."""


def groups(workspace: Workspace) -> list[Record]:
    """Returns all readable groups of a workspace, the newest first."""
    return [record for folder in folders(workspace.seeds) if (record := folder.record())]


def runs_of(workspace: Workspace, group: Record) -> dict[int, RunFolder]:
    """Returns the group's runs that have started, by seed; the newest of several
    with the same seed.
    """
    seeds = {digest: seed for seed, digest in group.digests.items()}
    found: dict[int, RunFolder] = {}
    for folder in below(workspace, group.name):
        record = folder.record()
        if record is not None and record.digest in seeds:
            found.setdefault(seeds[record.digest], folder)
    return dict(sorted(found.items()))


def evaluations(runs: Mapping[int, RunFolder]) -> Curves:
    """Returns the metrics of evaluations without ``eval/``; values that are not
    finite are excluded.
    """
    found: Curves = {}
    for seed, folder in runs.items():
        for line, _ in lines(folder.spool):
            for name, value in line.metrics.items():
                if name.startswith("eval/") and math.isfinite(value):
                    found.setdefault(name.removeprefix("eval/"), {}).setdefault(seed, {})[line.step] = value
    return found


def last(curves: Curves) -> dict[str, dict[int, float]]:
    """The last value of every metric, by seed."""
    return {name: {seed: of[max(of)] for seed, of in by_seed.items()} for name, by_seed in curves.items()}


def bounds_of(recipe: Recipe) -> Bounds:
    """Returns the bounds of evaluation metrics that the recipe's plugins declare."""
    bounds = {**recipe.model.bounds, **recipe.data.bounds}
    if recipe.objective is not None and recipe.objective.unit == "share":
        bounds[recipe.objective.name] = (0.0, 1.0)
    return bounds


def bounds_for(name: str, bounds: Bounds) -> tuple[float, float]:
    """Returns the smallest and the largest possible value of a metric."""
    matching = (limits for pattern, limits in bounds.items() if fnmatchcase(name, pattern))
    return next(matching, (-math.inf, math.inf))


def means(curves: Curves, count: int, bounds: Bounds) -> Iterator[tuple[str, int, Interval]]:
    """Yields metrics, the steps at which all seeds were evaluated, and the means there.

    Args:
        curves: Values by metric, seed and step.
        count: Number of seeds.
        bounds: Smallest and largest possible value of metrics, by pattern. No interval exceeds them.
    """
    for name, by_seed in curves.items():
        steps = set.intersection(*(set(of) for of in by_seed.values())) if len(by_seed) == count else set[int]()
        for step in sorted(steps):
            interval = student([values[step] for values in by_seed.values()])
            yield name, step, interval.clipped(*bounds_for(name, bounds))


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Returns by how much the other group's mean is larger: of pairs if both have the same seeds,
    else by Welch (1947).
    """
    from scipy.stats import ttest_ind, ttest_rel

    paired = one.keys() == other.keys()
    sides = [[side[seed] for seed in sorted(side)] for side in (other, one)]
    bounds = (ttest_rel(*sides) if paired else ttest_ind(*sides, equal_var=False)).confidence_interval(CONFIDENCE)
    return Interval(fmean(sides[0]) - fmean(sides[1]), float(bounds.low), float(bounds.high))


def compare(workspace: Workspace, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the results of two groups and their differences; None if these are
    not names of two groups.

    They are named as ``find`` understands it. Plain data: ``groups``, ``paired`` (whether their seeds are the
    same), and for every metric of both ``values`` by seed of each, and ``difference`` with its interval.

    Raises:
        UsageError: a group has fewer than two seeds that were evaluated.
    """
    sides = [group for name in names if (group := _group(workspace, name))]
    if len(names) != 2 or len(sides) != 2:
        return None
    found = [last(evaluations(runs_of(workspace, group))) for group in sides]
    for group, values in zip(sides, found, strict=True):
        if max(map(len, values.values()), default=0) < 2:
            raise UsageError(f"{group.name} has no two seeds that were evaluated: continue it first")
    shared = [name for name in found[0] if name in found[1] and min(len(each[name]) for each in found) > 1]
    metrics = {
        name: {
            "values": [each[name] for each in found],
            "difference": _possible(difference(found[0][name], found[1][name]), name, sides[0].bounds)._asdict(),
        }
        for name in shared
    }
    paired = all(found[0][name].keys() == found[1][name].keys() for name in shared)
    synthetic = [group.name for group in sides if group.synthetic]
    names = [group.name for group in sides]
    return {"groups": names, "paired": paired, "synthetic": synthetic, "metrics": metrics}


def _possible(interval: Interval, name: str, bounds: Bounds) -> Interval:
    """Returns the interval of a difference without values that no two means can have."""
    low, high = bounds_for(name, bounds)
    return interval.clipped(low - high, high - low)


def _group(workspace: Workspace, name: str) -> Record | None:
    """The group of that name; None if that is the name of a run, or of nothing."""
    with suppress(UsageError):
        record = find(workspace.runs, name, workspace.seeds).record()
        return record if record is not None and record.kind == "seeds" else None
    return None


def draw(
    curves: Curves, first: Sequence[str], unit: str, folder: Path, bounds: Bounds, label: str = "one seed"
) -> list[Path]:
    """Draws a few metrics over the training: every seed, and the mean with its 95 % interval.

    Args:
        curves: Values by metric, seed and step.
        first: Metrics to draw before all others.
        unit: What steps count.
        folder: Where the plot is written.
        bounds: Smallest and largest possible value of metrics, by pattern.
        label: Of the curve of one seed.
    """
    shown = [name for name in dict.fromkeys([*first, *sorted(curves)]) if name in curves][:_PANELS]

    steps = {step for name in shown for values in curves[name].values() for step in values}

    def picture(canvas: Any) -> None:
        for axes, name in zip(canvas.subplots(1, len(shown), squeeze=False, sharex=True)[0], shown, strict=True):
            seeds = len(curves[name])
            for of in curves[name].values():
                axes.plot(*zip(*sorted(of.items()), strict=True), ".-", **_SEED, label=label)
            # Seeds may share no step yet.
            shared = [*means({name: curves[name]}, seeds, bounds)] if seeds > 1 else []
            _draw_means(axes, [(step, *interval) for _, step, interval in shared])
            title = f"{name}, {seeds} seeds" if seeds > 1 else name
            axes.set(title=title, xlabel=unit.replace("_", " "))
            axes.xaxis.set_major_locator(_locator(steps))
            axes.xaxis.set_major_formatter("{x:,.0f}")
        legend(canvas)

    return draw_all({PICTURE: (picture, (_PANEL[0] * len(shown), _PANEL[1]))}, folder) if shown else []


def _locator(steps: Collection[int]) -> Any:
    """Returns the positions of numbers at the axis of steps: a scale would repeat the number of a single step."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    return FixedLocator([*steps]) if len(steps) == 1 else MaxNLocator(nbins=6, integer=True)


def _draw_means(axes: Any, shared: Sequence[tuple[int, float, float, float]]) -> None:
    """Draws the means at shared steps with their intervals: as a band, or as a bar at a single step."""
    if not shared:
        return
    steps, middle, low, high = zip(*shared, strict=True)
    if len(shared) == 1:
        axes.plot(steps * 2, [*low, *high], color=BLUE, alpha=0.4, linewidth=4, label="its 95 % interval")
    else:
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, linewidth=0, label="its 95 % interval")
    axes.plot(steps, middle, "o-", color=BLUE, markersize=3, label="mean of the seeds")
