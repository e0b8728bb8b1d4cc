"""A table of runs: one line for each, with fields, metrics and settings as columns."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from runner.recipe.lock import read_lock
from runner.recipe.recipe import flatten
from runner.system.console import CleanText, Console
from runner.system.errors import RunnerError, UsageError
from runner.system.escapes import escape_line
from runner.system.secrets import redact, redact_values
from runner.system.suggestions import suggestion
from runner.system.text_lines import figure
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.keys import mlflow_key
from runner.tracking.listing import listing
from runner.tracking.selection import select
from runner.tracking.workspace import Workspace

Row = Mapping[str, Any]

_GAP = "  "

DEFAULT_FIELDS = ("name", "kind", "status", "recipe", "started", "seconds", "step", "goal", "unit")
"""Columns of a table for which none were selected, before metrics and settings."""
FIELDS = (
    *DEFAULT_FIELDS,
    "experiment",
    "group",
    "note",
    "reason",
    "digest",
    "run_id",
    "run_dir",
    "last_checkpoint",
    "resumable",
    "synthetic",
    "smoke",
)
"""Columns with facts about a run."""


def runs(
    where: Sequence[str] = (),
    *,
    recipe: str | None = None,
    kind: str | None = None,
    since: str | None = None,
    columns: Sequence[str] = (),
    sort: str | None = None,
    reverse: bool = False,
) -> Any:
    """Returns the runs of the workspace as a table, as ``runner ls --csv`` prints it.

    Args:
        where: Conditions on the newest value of a metric: ``["eval/loss<0.5"]``.
        recipe: Name of the recipe; ``*`` matches any text.
        kind: ``run``, ``ablation``, ``study`` or ``seeds``.
        since: The largest age, ``2d`` or ``3h``, or the earliest date.
        columns: Fields of a run, metrics (``eval/loss``) and settings (``optimizer.lr``); by default
            the fields, the metrics of evaluations, and all settings that were overridden.
        sort: The column by which runs are sorted, smallest first; by default the newest is first.
        reverse: Whether the largest is first.

    Returns:
        A ``DataFrame`` if pandas is installed, otherwise a list of mappings.

    Raises:
        RunnerError: A condition or a column is not valid.
    """
    selected = select(listing(Workspace()), where, recipe, since, kind)  # type: ignore[arg-type]
    rows = table_rows(sorted_runs(selected, sort, reverse), columns)
    try:
        import pandas as pd  # type: ignore[import-untyped]
    except ImportError:
        return rows
    return pd.DataFrame(rows)


def sorted_runs(selected: Sequence[Row], sort: str | None, reverse: bool = False) -> list[Row]:
    """Returns runs, in the form of ``listing``, sorted by a column; those without a value are last.

    Raises:
        UsageError: No run has that column.
    """
    if sort is None:
        return [*reversed(selected)] if reverse else [*selected]
    rows = table_rows(selected, [sort])
    values = [row[sort] for row in rows]
    present = [number for number, value in enumerate(values) if _has_order(value)]
    absent = [number for number, value in enumerate(values) if not _has_order(value)]
    # Text, such as a status, is compared if a column has any.
    is_text = any(isinstance(values[number], str) for number in present)

    def sort_key(number: int) -> Any:
        return str(values[number]) if is_text else values[number]

    order = sorted(present, key=sort_key, reverse=reverse)
    return [selected[number] for number in (*order, *absent)]


def _has_order(value: Any) -> bool:
    """Returns whether a value can be compared; NaN cannot."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return isinstance(value, str | int | float) and not is_nan


def table_rows(selected: Sequence[Row], columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns a mapping from columns to values for each run; None where it has no value.

    Args:
        selected: Runs in the form of ``listing``.
        columns: See ``runs``.

    Raises:
        UsageError: No run has one of the columns.
    """
    names = list(columns) or _default_columns(selected)
    settings = [_settings(run, names) for run in selected]
    rows = []
    for run, run_settings in zip(selected, settings, strict=True):
        # A metric that is not finite is text in a listing.
        metrics = {name: float(value) for name, value in (run["metrics"] or {}).items()}
        # MLflow stores some names under another key.
        metrics |= {name: metrics[mlflow_key(name)] for name in names if mlflow_key(name) in metrics}
        values = {**run_settings, **metrics, **{name: run.get(name) for name in FIELDS}}
        if values["started"] is not None:
            started = datetime.fromtimestamp(values["started"])
            values["started"] = started.isoformat(timespec="seconds")
        rows.append({name: values.get(name) for name in names})

    available = {*FIELDS, *(metric for run in selected for metric in run["metrics"] or ())}
    available |= {path for values in settings for path in values}
    for name in names:
        # A setting may be null in all runs.
        if selected and not {name, mlflow_key(name)} & available:
            # Of the many settings, only a similar one is mentioned.
            hint = suggestion(name, available).partition(" - known: ")[0]
            raise UsageError(f"no run has a field, metric or setting '{name}'{hint}")
    return [dict(redact_values(row)) for row in rows]


def _default_columns(selected: Sequence[Row]) -> list[str]:
    """Returns the columns of a table for which none were selected."""
    metrics = {name for run in selected for name in run["metrics"] or () if name.startswith(("eval/", "test/"))}
    overrides = {path for run in selected for path in run["overrides"] or ()}
    return [*DEFAULT_FIELDS, *sorted(metrics), *sorted(overrides)]


def _settings(run: Row, names: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of a run by dotted path, if a column needs them."""
    metrics = run["metrics"] or {}
    if all(name in FIELDS or name in metrics for name in names):
        return {}
    settings: dict[str, Any] = dict(run["overrides"] or {})
    # A group of runs has no lock, and one that cannot be read has no settings.
    with suppress(RunnerError, OSError):
        lock = Path(run["run_dir"], LOCK_NAME)
        if lock.exists():
            settings |= flatten(read_lock(lock)["recipe"])
    return settings


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table as CSV, without a line break at the end."""
    text = io.StringIO()
    # A reader could take a bare carriage return for the end of a row.
    cells = [{name: _with_line_feeds(value) for name, value in row.items()} for row in rows]
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue().removesuffix("\n")


def _with_line_feeds(value: Any) -> Any:
    """Returns a text whose lines end with a line feed; any other value is returned unchanged."""
    return "\n".join(re.split("\r\n?", value)) if isinstance(value, str) else value


def show_table(rows: Sequence[Mapping[str, Any]], none: str, console: Console) -> None:
    """Prints one line for each run, whatever the width of the screen.

    ``none`` is printed if there are no runs.
    """
    if not rows:
        console.print(none or "no runs yet; start one: runner run marl_phase2", highlight=False)
        return
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    padded = [_padded(name, values) for name, values in columns.items()]
    for number, cells in enumerate(zip(*padded, strict=True)):
        line = CleanText(_GAP.join(cells), style="" if number else "bold")
        line.rstrip()
        console.print(line, soft_wrap=True)


def _padded(name: str, values: Sequence[Any]) -> list[str]:
    """Returns the cells of a column below its name, of one width, with numbers to the right."""
    cells = [escape_line(name), *map(_cell, values)]
    width = max(map(cell_len, cells))
    has_numbers = any(isinstance(value, float | int) for value in values)
    blanks = [" " * (width - cell_len(cell)) for cell in cells]
    if has_numbers:
        return [blank + cell for cell, blank in zip(cells, blanks, strict=True)]
    return [cell + blank for cell, blank in zip(cells, blanks, strict=True)]


def _cell(value: Any) -> str:
    """Returns a value as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = figure(value) if isinstance(value, float) else str(value)
    return escape_line(redact(text))
