"""Names of metrics that plugins choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runner.system.errors import RunnerError


def check_metric_name(name: Any, method: str) -> None:
    """Raises a RunnerError if a name cannot be that of a metric.

    Args:
        name: The key under which a metric was returned.
        method: The method that returned it, for the message.
    """
    if not isinstance(name, str) or not name.strip():
        hint = "use a string with at least one character"
        raise RunnerError(f"{method} returned a metric with the name {name!r}; {hint}")


def join_metrics(
    method: str,
    metrics: Mapping[str, float],
    source: str,
    source_metrics: Mapping[str, float],
) -> dict[str, float]:
    """Joins the metrics of a method with those of a source.

    Raises:
        RunnerError: Both have a metric of the same name, and one would be lost.
    """
    refuse_names(method, metrics, source_metrics, f"is a metric of {source}")
    return {**metrics, **source_metrics}


def refuse_names(
    method: str, names: Iterable[str], reserved: Iterable[str], reason: str
) -> None:
    """Raises a RunnerError that gives the reason if one of the names is reserved."""
    conflicts = sorted(set(names) & set(reserved))
    if conflicts:
        metric = f"a metric with the name '{conflicts[0]}', which {reason}"
        raise RunnerError(f"{method} returned {metric}; use another name")
