"""Values that a training logged, and the objectives and bounds of a study by them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runner.study.config import ObjectiveConfig, StudyConfig
from runner.study.intervals import Interval, union
from runner.system.errors import UsageError
from runner.system.suggestions import suggestion
from runner.tracking.keys import mlflow_key
from runner.tracking.spool import lines


class Point(NamedTuple):
    """A logged value."""

    at: float  # seconds since 1970
    step: int
    value: float


Logged = Mapping[str, Sequence[Point]]


def logged_by(spool: Path, prefix: str, names: Iterable[str] = ()) -> Logged:
    """Returns all logged values of a training, by metric, in order.

    Args:
        spool: The log of the training.
        prefix: Of the keys of its metrics.
        names: Metrics that are returned by their names, also where these are no keys of MLflow.
    """
    names_by_key = {mlflow_key(prefix + name): name for name in names}
    points: dict[str, list[Point]] = defaultdict(list)
    for line, _ in lines(spool):
        seconds = line.t / 1e3
        for key, value in line.metrics.items():
            metric = names_by_key.get(key, key.removeprefix(prefix))
            points[metric].append(Point(seconds, line.step, value))
    return points


def objectives(config: StudyConfig, logged: Logged, active: Sequence[Interval]) -> dict[str, float | None]:
    """The value of every objective by what one training logged, and by when it was active.

    None if what it is to reach was not reached; a ``UsageError`` if a metric was not logged.
    """
    return {
        name: _objective_value(objective, _points(name, logged), active)
        for name, objective in config.objectives.items()
    }


def bounded_values(config: StudyConfig, logged: Logged) -> dict[str, float]:
    """Returns the last value of every metric that has a bound. Raises as above."""
    # The verdict of the gate, whose bound is a text, is not logged by a training.
    names = [name for name, bound in config.constraints.items() if not isinstance(bound, str)]
    return {name: _points(name, logged)[-1].value for name in names}


def excesses(config: StudyConfig, values: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much bounded metrics exceed their bounds; 0 or less is within."""
    result = {}
    for name, value in values.items():
        bound = config.constraints[name]
        assert not isinstance(bound, str)
        over_maximum = -math.inf if bound.max is None else value - bound.max
        under_minimum = -math.inf if bound.min is None else -(value - bound.min)
        result[name] = math.inf if math.isnan(value) else max(under_minimum, over_maximum)
    return result


def _objective_value(objective: ObjectiveConfig, points: Sequence[Point], active: Sequence[Interval]) -> float | None:
    if objective.reach is not None:
        return _time_to_reach(objective, points, active)

    values = [point.value for point in points]
    if objective.value in (None, "last"):
        return values[-1]
    # NaN has no order, so that the best value would depend on where it is.
    if any(map(math.isnan, values)):
        return math.nan
    if objective.value == "best":
        return max(values) if objective.direction == "maximize" else min(values)
    if objective.value == "mean":
        return statistics.fmean(values)
    return statistics.median(values)


def _time_to_reach(objective: ObjectiveConfig, points: Sequence[Point], active: Sequence[Interval]) -> float | None:
    """Returns progress or active seconds until the metric is as good as the objective demands."""
    sign = 1 if objective.direction == "maximize" else -1
    target = sign * (objective.reach or 0.0)
    first = next((point for point in points if sign * point.value >= target), None)
    if first is None:
        return None
    if objective.reach_in == "progress":
        return float(first.step)
    return union([(begin, min(end, first.at)) for begin, end in active if begin < first.at])


def _points(name: str, logged: Logged) -> Sequence[Point]:
    if not logged.get(name):
        raise UsageError(f"no metric '{name}' was logged{suggestion(name, logged)}")
    return logged[name]
