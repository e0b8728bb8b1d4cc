"""Selects listed runs by their metrics, recipe, and age."""

import operator
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from runner.system.errors import UsageError
from runner.system.suggestions import suggestion
from runner.tracking.keys import mlflow_key
from runner.tracking.record import Kind

SECONDS = {"w": 604800, "d": 86400, "h": 3600, "min": 60, "s": 1}
_AGE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(SECONDS)})")
_CONDITION = re.compile(r"\s*([^<>=!]+?)\s*(<=|>=|!=|==?|<|>)\s*(\S+)\s*")
_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "==": operator.eq,
}


def select(
    runs: Sequence[Mapping[str, Any]],
    where: Sequence[str] = (),
    recipe: str | None = None,
    since: str | None = None,
    kind: Kind | None = None,
) -> list[Mapping[str, Any]]:
    """Returns the runs, in the form of ``listing``, that meet all conditions.

    Args:
        runs: All runs.
        where: Conditions on the newest value of a metric, ``eval/return>0``; a
            run without that metric meets none.
        recipe: The recipe's name, in which ``*`` matches any text.
        since: The largest age (``2d``, ``3h``, ``30min``), or the earliest date (``2026-01-31``).
        kind: Type of the records.

    Raises:
        UsageError: one of them cannot be read, or no run has that metric.
    """
    metric_names = {name for run in runs for name in run["metrics"] or ()}
    conditions = [_condition(text, metric_names) for text in where]
    earliest = None if since is None else _moment(since)

    def is_selected(run: Mapping[str, Any]) -> bool:
        if recipe is not None and not fnmatchcase(run["recipe"] or "", recipe):
            return False
        if kind is not None and run["kind"] != kind:
            return False
        if earliest is not None and (run["started"] or 0.0) < earliest:
            return False
        metrics = run["metrics"] or {}
        return all(condition.is_met_by(metrics) for condition in conditions)

    return [run for run in runs if is_selected(run)]


@dataclass(frozen=True)
class _Condition:
    """A comparison of the newest value of a metric with a number."""

    metric: str
    sign: str
    bound: float

    def is_met_by(self, metrics: Mapping[str, Any]) -> bool:
        if self.metric not in metrics:
            return False
        # A number that is not finite is text.
        value = float(metrics[self.metric])
        return bool(_OPERATORS[self.sign](value, self.bound))


def _condition(text: str, metric_names: set[str]) -> _Condition:
    match = _CONDITION.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        condition = _Condition(match[1], match[2], float(match[3]))
    except ValueError:
        raise UsageError(f"--where '{text}': should be METRIC>NUMBER, for example eval/return>0") from None
    name = condition.metric
    if metric_names and name not in metric_names:
        # MLflow stores some names under another key.
        if (key := mlflow_key(name)) in metric_names:
            return replace(condition, metric=key)
        raise UsageError(f"--where '{text}': no run has a metric '{name}'{suggestion(name, metric_names)}")
    return condition


def _moment(text: str) -> float:
    """Returns a time in seconds since 1970."""
    age = _AGE.fullmatch(text)
    if age:
        return time.time() - float(age[1]) * SECONDS[age[2]]
    try:
        # In local time, unless it has another zone.
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since '{text}': should be an age like 2d, 3h or 30min, or a date like 2026-01-31"
        ) from None
