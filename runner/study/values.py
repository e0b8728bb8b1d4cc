"""What a training has come to, from what it logged."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.study.config import BoundConfig, ObjectiveConfig, StudyConfig
from runner.system.errors import UsageError
from runner.system.names import suggestion
from runner.tracking.spool import lines

Interval = tuple[float, float]
"""Begin and end in seconds since 1970."""


class Point(NamedTuple):
    """One logged value."""

    at: float
    """Seconds since 1970."""
    step: int
    value: float


Logged = Mapping[str, Sequence[Point]]


def logged_by(spool: Path, prefix: str) -> Logged:
    """All that a training logged, by metric, in order."""
    found: dict[str, list[Point]] = defaultdict(list)
    for line, _ in lines(spool):
        for name, value in line.metrics.items():
            found[name.removeprefix(prefix)].append(Point(line.t / 1e3, line.step, value))
    return found


def objectives(config: StudyConfig, logged: Logged, active: Sequence[Interval]) -> dict[str, float | None]:
    """The value of every objective; None if what it is to reach was not reached.

    Args:
        config: the study's settings.
        logged: by one training.
        active: when it was trained, for the time that it took to reach something.

    Raises:
        UsageError: a metric was not logged.
    """
    return {name: _value(name, each, logged, active) for name, each in config.objectives.items()}


def bounds(config: StudyConfig, logged: Logged) -> dict[str, float]:
    """How far the last value of every bounded metric is beyond its bound; 0 or less is within.

    Raises:
        UsageError: a metric was not logged.
    """
    found = {}
    for name, bound in config.constraints.items():
        if isinstance(bound, BoundConfig):
            last = _points(name, logged)[-1].value
            below = bound.min - last if bound.min is not None else None
            above = last - bound.max if bound.max is not None else None
            excess = max(each for each in (below, above) if each is not None)
            found[name] = math.inf if math.isnan(last) else excess
    return found


def union(intervals: Sequence[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _value(name: str, objective: ObjectiveConfig, logged: Logged, active: Sequence[Interval]) -> float | None:
    points = _points(name, logged)
    sign = 1 if objective.direction == "maximize" else -1
    if objective.reach is not None:
        first = next((point for point in points if sign * point.value >= sign * objective.reach), None)
        if first is None or objective.reach_in == "progress":
            return None if first is None else float(first.step)
        return union([(begin, min(end, first.at)) for begin, end in active if begin < first.at])
    values = [point.value for point in points]
    if objective.value in (None, "last"):
        return values[-1]
    if any(map(math.isnan, values)):  # which has no order
        return math.nan
    if objective.value == "best":
        return sign * max(sign * value for value in values)
    return statistics.fmean(values) if objective.value == "mean" else statistics.median(values)


def _points(name: str, logged: Logged) -> Sequence[Point]:
    if not logged.get(name):
        raise UsageError(f"no metric '{name}' was logged{suggestion(name, logged)}")
    return logged[name]
