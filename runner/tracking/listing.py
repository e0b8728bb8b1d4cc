"""The runs of a workspace, as ``runner ls`` shows them."""

import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from runner.tracking.spool import unsent
from runner.tracking.workspace import Record, Workspace, folders

_COLOURS = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MISSING = "-"
_GAP = "  "
_DISPENSABLE = ("started", "checkpoint", "resume")
"""Columns that a narrow screen does without, in this order."""


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    """All runs, the newest first, as plain data: what is in ``run.json``, and what is to be seen in the folder.

    Times are in seconds since 1970. ``step`` is not behind the newest checkpoint, which a process that died may have
    been unable to note; ``last_checkpoint`` is how far that is, in the run's unit, or None if there is none. Of a run
    whose ``run.json`` cannot be read, ``status`` is UNKNOWN and what is in that file is None.
    """
    runs = []
    for folder in folders(workspace.runs):
        record, last, reason = folder.record(), folder.last_checkpoint, folder.resumable
        known: dict[str, Any] = dict.fromkeys(Record.model_fields) | {"status": "UNKNOWN"}
        if record is not None:
            known = record.model_dump() | {"step": max(record.step, last or 0)}
        runs.append(
            {**known, "name": folder.name, "run_dir": str(folder.path), "last_checkpoint": last,
             "resumable": not reason, "not_resumable": reason, "unsent_bytes": unsent(folder.spool)}
        )  # fmt: skip
    return runs


def show(runs: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints a line for each run, and below it what is to be said about that run; names are never broken."""
    if not runs:
        console.print("no runs yet; start one: runner run marl_phase2", markup=False, highlight=False)
        return
    rows = [_cells(run) for run in runs]
    rows.insert(0, {title: title for title in rows[0]})
    widths = {title: max(cell_len(row[title]) for row in rows) for title in rows[0]}
    columns = list(widths)
    for title in (*_DISPENSABLE, "run"):  # a run whose name does not fit has a line of its own for that
        if sum(widths[each] for each in columns) + len(_GAP) * (len(columns) - 1) <= console.width:
            break
        columns.remove(title)
    for run, row in zip([None, *runs], rows, strict=True):
        line = Text("" if "run" in columns else f"{row['run']}\n{_GAP}", style="" if run else "bold")
        for title in columns:
            style = _COLOURS.get(row[title], "") if title == "status" else ""
            line.append(row[title] + " " * (widths[title] - cell_len(row[title])) + _GAP, style)
        line.rstrip()
        console.print(line, soft_wrap=True)
        for text in wrap(_remark(run) if run else "", max(20, console.width - len(2 * _GAP))):
            console.print(Text(2 * _GAP + text, style="dim"), soft_wrap=True)


def _cells(run: Mapping[str, Any]) -> dict[str, str]:
    """What each column says about a run."""
    progress = started = _MISSING
    if run["goal"] is not None:
        share = min(run["step"] / run["goal"], 1.0) if run["goal"] else 0.0
        progress = f"{run['step']:,}/{run['goal']:,} {run['unit']} ({share:.0%})"
    if run["started"] is not None:
        seconds = max(0.0, time.time() - run["started"])
        length, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
        started = f"{seconds / length:.0f} {unit} ago"
    return {
        "run": run["name"],
        "status": run["status"],
        "progress": progress,
        "checkpoint": _MISSING if run["last_checkpoint"] is None else f"{run['last_checkpoint']:,}",
        "started": started,
        "resume": "yes" if run["resumable"] else "no",
    }


def _remark(run: Mapping[str, Any]) -> str:
    """What to know about a run beside its columns."""
    parts = []
    if run["status"] == "FAILED":
        parts.append(run["reason"].partition("\n")[0])
    if run["status"] != "FINISHED":
        parts.append(run["not_resumable"])
    if run["unsent_bytes"] and run["status"] in ("FINISHED", "FAILED", "KILLED"):
        parts.append("MLflow lacks a part: runner sync")
    return "; ".join(filter(None, parts))
