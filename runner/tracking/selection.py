"""Selects listed runs by their metrics, recipe, and age."""

import operator
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from runner.system.errors import UsageError
from runner.system.names import suggestion
from runner.tracking.record import Kind

SECONDS = {"w": 604800, "d": 86400, "h": 3600, "min": 60, "s": 1}
_AGE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(SECONDS)})")
_CONDITION = re.compile(r"\s*([\w.\- :/]+?)\s*(<=|>=|!=|==?|<|>)\s*(\S+)\s*")
_OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne, "=": operator.eq,
    "==": operator.eq,
}  # fmt: skip


def select(
    runs: Sequence[Mapping[str, Any]], where: Sequence[str] = (), recipe: str | None = None, since: str | None = None,
    kind: Kind | None = None,
) -> list[Mapping[str, Any]]:  # fmt: skip
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
    known = {name for run in runs for name in run["metrics"] or ()}
    conditions = [_condition(text, known) for text in where]
    begun = None if since is None else _moment(since)

    def meant(run: Mapping[str, Any]) -> bool:
        metrics = run["metrics"] or {}
        return (
            (recipe is None or fnmatchcase(run["recipe"] or "", recipe))
            and kind in (None, run["kind"])
            and (begun is None or (run["started"] or 0.0) >= begun)
            and all(
                name in metrics and _OPERATORS[sign](float(metrics[name]), bound) for name, sign, bound in conditions
            )
        )

    return [run for run in runs if meant(run)]


def _condition(text: str, known: set[str]) -> tuple[str, str, float]:
    """A metric, how it is compared, and with which number."""
    found = _CONDITION.fullmatch(text)
    try:
        name, sign, bound = found[1], found[2], float(found[3])  # type: ignore[index]  # caught below
    except (TypeError, ValueError):
        raise UsageError(f"--where '{text}': should be METRIC>NUMBER, for example eval/return>0") from None
    if known and name not in known:
        raise UsageError(f"--where '{text}': no run has a metric '{name}'{suggestion(name, known)}")
    return name, sign, bound


def _moment(text: str) -> float:
    """Returns a time in seconds since 1970."""
    if age := _AGE.fullmatch(text):
        return time.time() - float(age[1]) * SECONDS[age[2]]
    try:
        return datetime.fromisoformat(text).timestamp()  # in local time, unless it has another zone
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since '{text}': should be an age like 2d, 3h or 30min, or a date like 2026-01-31"
        ) from None
