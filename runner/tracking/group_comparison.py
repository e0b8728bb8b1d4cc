"""Compares two groups of runs that differ only in their seed, or only in their fold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean, variance
from typing import Any

from runner.recipe.lock import read_lock
from runner.system.errors import UsageError
from runner.system.interval import CONFIDENCE, Interval, student
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.lookup import find
from runner.tracking.record import REPEATED, Record
from runner.tracking.seeds import Bounds, bounds_for, evaluations, is_finished, last, overlap, runs_of
from runner.tracking.workspace import RunFolder, Workspace

Values = Mapping[int, float]
"""The last value of a metric by seed or fold."""


def compare(workspace: Workspace, names: Sequence[str]) -> dict[str, Any] | None:
    """Returns the results of two groups and their differences; None if these are not names of two
    groups.

    Groups are named as ``find`` understands it. The result is plain data: ``groups``; ``kind``,
    seeds or folds; ``paired``, whether every run has a counterpart with the same seed or held-out
    samples; ``left_out``, seeds or folds by group whose training has not finished or, in groups of
    the same seeds or folds, has no finished counterpart; and for every metric of both ``values`` by
    seed or fold of each, and ``difference`` with its interval.

    Raises:
        UsageError: One group is of seeds and the other of folds, or a group has fewer than two
            finished runs that were evaluated.
    """
    records = [_group(workspace, name) for name in names]
    pair = [record for record in records if record is not None]
    if len(names) != 2 or len(pair) != 2:
        return None
    kind = pair[0].kind
    if pair[1].kind != kind:
        groups = " and ".join(f"{group.name} is of {group.kind}" for group in pair)
        raise UsageError(f"{groups}: compare two groups of the same kind")

    runs = []
    for group in pair:
        members = runs_of(workspace, group)
        runs.append({key: folder for key, folder in members.items() if is_finished(folder)})
    if pair[0].digests.keys() == pair[1].digests.keys():
        shared = runs[0].keys() & runs[1].keys()
        runs = [{key: folder for key, folder in side.items() if key in shared} for side in runs]
    results = [last(evaluations(group_runs)) for group_runs in runs]
    for group, values in zip(pair, results, strict=True):
        if max(map(len, values.values()), default=0) < 2:
            raise UsageError(
                f"{group.name} has no two {kind} that finished and were evaluated, "
                "here and in the other group: continue it first"
            )

    is_divided_alike = kind == "seeds" or _divisions(runs[0]) == _divisions(runs[1])
    baseline, candidate = results
    metrics = {}
    paired = True
    for name in baseline:
        # An interval needs two runs on each side.
        if name not in candidate or min(len(baseline[name]), len(candidate[name])) < 2:
            continue
        is_paired = is_divided_alike and baseline[name].keys() == candidate[name].keys()
        interval = difference(baseline[name], candidate[name], is_paired, has_folds=kind == "folds")
        metrics[name] = {
            "values": [baseline[name], candidate[name]],
            "difference": _possible(interval, name, pair[0].bounds)._asdict(),
        }
        paired = paired and is_paired
    return {
        "groups": [group.name for group in pair],
        "kind": kind,
        "paired": paired,
        "left_out": {
            group.name: sorted(group.digests.keys() - side.keys())
            for group, side in zip(pair, runs, strict=True)
            if group.digests.keys() - side.keys()
        },
        "synthetic": [group.name for group in pair if group.synthetic],
        "metrics": metrics,
    }


def difference(baseline: Values, candidate: Values, is_paired: bool, has_folds: bool = False) -> Interval:
    """Returns by how much the candidate's mean is larger: of pairs, or else by Welch (1947).

    Trainings of a cross-validation share most of their samples, so that their intervals are wider
    (``overlap``).

    Args:
        baseline: Values by seed or fold.
        candidate: Values by seed or fold.
        is_paired: Whether values of the same key belong together.
        has_folds: Whether the keys are folds.

    Returns:
        The difference with its interval; NaN if a value is not finite.
    """
    if not all(map(math.isfinite, [*baseline.values(), *candidate.values()])):
        return Interval(math.nan, math.nan, math.nan)
    if is_paired:
        differences = [candidate[key] - baseline[key] for key in baseline]
        widening = overlap(len(differences)) if has_folds else 1.0
        return student(differences).widened(widening)

    from scipy.special import stdtrit

    center = fmean(candidate.values()) - fmean(baseline.values())
    sides = [[*baseline.values()], [*candidate.values()]]
    # Estimated variances of the two means, with their degrees of freedom.
    variances = []
    for values in sides:
        widening = overlap(len(values)) if has_folds else 1.0
        variances.append(widening**2 * variance(values) / len(values))
    total = sum(variances)
    if total == 0:
        return Interval(center, center, center)
    squares = [part**2 / (len(values) - 1) for part, values in zip(variances, sides, strict=True)]
    freedom = total**2 / sum(squares)
    half_width = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total)
    return Interval(center, center - half_width, center + half_width)


def _divisions(runs: Mapping[int, RunFolder]) -> dict[int, Any]:
    """Returns what decides which samples each run of a cross-validation holds out, by fold."""
    return {fold: _division(folder) for fold, folder in runs.items()}


def _division(folder: RunFolder) -> Any:
    # Runs without a readable lock are not paired.
    division: Any = folder.name
    with suppress(UsageError, OSError, KeyError):
        recipe = read_lock(folder.path / LOCK_NAME)["recipe"]
        data = recipe["data"]
        division = (recipe["seed"], data["kind"], data["folds"])
    return division


def _possible(interval: Interval, name: str, bounds: Bounds) -> Interval:
    """Returns the interval of a difference without values that no two means can have."""
    low, high = bounds_for(name, bounds)
    return interval.clipped(low - high, high - low)


def _group(workspace: Workspace, name: str) -> Record | None:
    """Returns the group of that name; None if that is the name of a run, or of nothing."""
    with suppress(UsageError):
        record = find(workspace.runs, name, workspace.seeds).record()
        return record if record is not None and record.kind in REPEATED else None
    return None
