"""The runs of a workspace, as ``runner ls`` shows them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from runner.tracking.folder import Record, RunFolder, folders
from runner.tracking.workspace import Workspace

_COLOURS = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MISSING = "-"
_GAP = "  "
_DISPENSABLE = ("started", "checkpoint", "resume")
"""Columns that a narrow screen does without, in this order."""


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    """All runs, the newest first, as plain data.

    Returns:
        For each run everything in its ``run.json`` (times in seconds since 1970; ``step`` is not behind the newest
        checkpoint, which a process that died may have been unable to note), and ``run_dir``, ``last_checkpoint`` (how
        far it is, in the run's unit; None if there is none), ``resumable``, ``not_resumable`` (why) and
        ``unsent_bytes``. Of a run whose ``run.json`` cannot be read, ``status`` is UNKNOWN and what is in that file is
        None.
    """
    return [_entry(folder) for folder in folders(workspace.runs)]


def show(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints a line for each run, and below it what is to be said about that run; names are never broken."""
    if not runs:
        console.print("no runs yet; start one: runner run marl_phase2", markup=False, highlight=False)
        return
    rows = [{title: title for title in _cells(runs[0])}, *map(_cells, runs)]
    widths = {title: max(cell_len(row[title]) for row in rows) for title in rows[0]}
    columns = _fitting(widths, console.width)
    for run, row in zip([None, *runs], rows, strict=True):
        _print_line(row, widths, columns, run, console)
        if run is not None and (remark := _remark(run)):
            for line in Text(remark, style="dim").wrap(console, max(20, console.width - len(2 * _GAP))):
                line.rstrip()
                console.print(Text(2 * _GAP) + line, soft_wrap=True)


def _entry(folder: RunFolder) -> dict[str, Any]:
    record = folder.record()
    last, reason = folder.last_checkpoint, folder.resumable
    known: dict[str, Any] = dict.fromkeys(Record.model_fields) | {"status": "UNKNOWN"}
    if record is not None:
        known = record.model_dump() | {"step": max(record.step, last or 0)}
    return {
        **known,
        "name": folder.name,
        "run_dir": str(folder.path),
        "last_checkpoint": last,
        "resumable": not reason,
        "not_resumable": reason,
        "unsent_bytes": folder.unsent,
    }


def _cells(run: Mapping[str, Any]) -> dict[str, str]:
    """What each column says about a run."""
    return {
        "run": run["name"],
        "status": run["status"],
        "progress": _progress(run),
        "checkpoint": _MISSING if run["last_checkpoint"] is None else f"{run['last_checkpoint']:,}",
        "started": _MISSING if run["started"] is None else f"{_age(run['started'])} ago",
        "resume": "yes" if run["resumable"] else "no",
    }


def _fitting(widths: Mapping[str, int], width: int) -> list[str]:
    """The columns that fit beside each other; without ``run``, if that needs a line of its own."""
    columns = list(widths)
    for title in (*_DISPENSABLE, "run"):
        if sum(widths[each] for each in columns) + len(_GAP) * (len(columns) - 1) <= width:
            break
        columns.remove(title)
    return columns


def _print_line(
    row: Mapping[str, str],
    widths: Mapping[str, int],
    columns: Sequence[str],
    run: Mapping[str, Any] | None,
    console: Console,
) -> None:
    line = Text(style="bold" if run is None else "")
    if "run" not in columns:
        line.append(f"{row['run']}\n{_GAP}")
    for title in columns:
        style = _COLOURS.get(row[title], "") if title == "status" else ""
        line.append(row[title] + " " * (widths[title] - cell_len(row[title])) + _GAP, style)
    line.rstrip()
    console.print(line, soft_wrap=True)


def _progress(run: Mapping[str, Any]) -> str:
    if run["goal"] is None:
        return _MISSING
    share = run["step"] / run["goal"] if run["goal"] else 0.0
    return f"{run['step']:,}/{run['goal']:,} {run['unit']} ({min(share, 1.0):.0%})"


def _remark(run: Mapping[str, Any]) -> str:
    """What to know about a run beside its columns."""
    parts = []
    if run["status"] == "FAILED":
        parts.append(run["reason"].partition("\n")[0])
    if run["not_resumable"] and run["status"] != "FINISHED":
        parts.append(run["not_resumable"])
    if run["unsent_bytes"] and run["status"] in ("FINISHED", "FAILED", "KILLED"):
        parts.append("MLflow lacks a part: runner sync")
    return "; ".join(filter(None, parts))


def _age(since: float) -> str:
    seconds = max(0.0, time.time() - since)
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), (1, "s"))
    return f"{seconds / length:.0f} {unit}"
