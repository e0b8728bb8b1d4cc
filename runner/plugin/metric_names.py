"""Names of metrics that plugins choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runner.system.errors import RunnerError


def check_metric_name(name: Any, who: str) -> None:
    """Raises a RunnerError if a name cannot be that of a metric.

    Args:
        name: The key under which a metric was returned.
        who: The method that returned it, for the message.
    """
    if not isinstance(name, str) or not name.strip():
        raise RunnerError(f"{who} returned a metric with the name {name!r}; use a string with at least one character")


def join_metrics(who: str, first: Mapping[str, float], other: str, second: Mapping[str, float]) -> dict[str, float]:
    """Joins the metrics of two methods.

    Raises:
        RunnerError: Both have a metric of the same name, and one would be lost.
    """
    refuse_names(who, first, second, f"is a metric of {other}")
    return {**first, **second}


def refuse_names(who: str, names: Iterable[str], reserved: Iterable[str], reason: str) -> None:
    """Raises a RunnerError that gives the reason if one of the names is reserved."""
    taken = sorted({*names} & {*reserved})
    if taken:
        raise RunnerError(f"{who} returned a metric with the name '{taken[0]}', which {reason}; use another name")
