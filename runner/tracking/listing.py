"""Runs, ablations, studies and groups of seeds of a workspace, as ``runner ls`` shows them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from rich.cells import cell_len

from runner.system.console import CleanText, Console
from runner.system.escapes import escape_line
from runner.system.lines import amount, figure, print_wrapped
from runner.system.secrets import redact
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.tracking.keys import interval_keys
from runner.tracking.record import Record
from runner.tracking.selection import SECONDS
from runner.tracking.spool import unsent
from runner.tracking.workspace import RunFolder, Workspace, folders

STATUS_STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
_UNITS = [(length, unit) for unit, length in SECONDS.items() if unit != "w"]
_MISSING = "-"
_AGAIN = "the same command continues it"
_SEEDS_AGAIN = "the same command continues it, with --resume"
_GAP = "  "
_DISPENSABLE = ("checkpoint", "took", "started")
"""Columns that a narrow screen does without, in this order."""
_LAST_DISPENSABLE = ("kind", "objective", "resume")
"""Dropped when the other columns are still too wide and names have separate lines."""


def listing(workspace: Workspace) -> list[dict[str, Any]]:
    """Returns everything in a workspace, the newest first, as plain data:
    ``run.json``, and facts from the folders.

    Times are in seconds since 1970, a metric that is not finite is text. ``step`` is at least that
    of the newest checkpoint, which a process that died may not have recorded; ``last_checkpoint``
    is the progress of that checkpoint, in the run's unit, or None without one. If ``run.json``
    cannot be read, ``status`` is UNKNOWN and its fields are None. The runs of a group of seeds
    follow it, in the order of their start.
    """
    found = [described(folder) for folder in folders(workspace.runs)]
    for place in (workspace.ablations, workspace.studies, workspace.seeds):
        found += [described(folder) for folder in folders(place) if folder.record()]  # not what was laid aside
    found.sort(key=lambda each: (each["started"] or 0.0, each["name"]))
    groups = {each["name"]: list[dict[str, Any]]() for each in found if each["kind"] == "seeds"}
    for each in found:
        groups.get(each["group"], []).append(each)
    above = [each for each in found if each["group"] not in groups]
    return [each for one in reversed(above) for each in (one, *groups.get(one["name"], ()))]


def described(folder: RunFolder) -> dict[str, Any]:
    """Returns the description of one folder."""
    record, last, reason = folder.record(), folder.last_checkpoint, folder.resumable
    known: dict[str, Any] = dict.fromkeys(Record.model_fields) | {"status": "UNKNOWN"}
    if record is not None:
        metrics = {name: value if isfinite(value) else str(value) for name, value in record.metrics.items()}
        workspace = Workspace(folder.path.parents[1])
        known = record.model_dump(mode="json") | {"tracking_uri": workspace.resolved_uri(record.tracking_uri)}
        known |= {"step": max(record.step, last or 0), "metrics": metrics}
        if record.kind != "run":
            known["status"] = "KILLED" if record.status == "RUNNING" and not record.at_work else record.status
            again = _SEEDS_AGAIN if record.kind == "seeds" else _AGAIN
            reason = "it is finished" if record.status == "FINISHED" else again
            if record.at_work:
                reason = f"process {record.owner.pid} on {record.owner.host} is at it"
    return known | {
        "name": folder.name, "run_dir": str(folder.path), "last_checkpoint": last, "resumable": not reason,
        "not_resumable": reason, "unsent_bytes": unsent(folder.spool),
    }  # fmt: skip


def show(runs: Sequence[Mapping[str, Any]], none: str, console: Console) -> None:
    """Prints a line for each run with remarks below it; names are never broken.

    ``none`` is printed if a selection has no runs.
    """
    if not runs:
        text = none or "no runs yet; start one: runner run marl_phase2"
        console.print(text, highlight=False)
        return
    groups = {run["name"]: run for run in runs if run["kind"] == "seeds"}
    rows = [_cells(run, _GAP if run["group"] in groups else "") for run in runs]
    rows.insert(0, {title: title for title in rows[0]})
    widths = {title: max(cell_len(row[title]) for row in rows) for title in rows[0]}
    titles = [title for title in widths if title != "kind" or {run["kind"] for run in runs} - {"run", None}]
    # Where nothing can be resumed, the column has no information.
    first = () if any(run["resumable"] for run in runs) else ("resume",)
    columns = _fitting(titles, widths, console.width, first)
    for run, row in zip([None, *runs], rows, strict=True):
        line = CleanText("" if "run" in columns else f"{row['run']}\n{_GAP}", style="" if run else "bold")
        for title in columns:
            style = STATUS_STYLES.get(row[title], "") if title == "status" else ""
            line.append(row[title] + " " * (widths[title] - cell_len(row[title])) + _GAP, style)
        line.rstrip()
        console.print(line, soft_wrap=True)
        for text in filter(None, _remarks(run, groups.get(run["group"])) if run else ()):
            print_wrapped(2 * _GAP + text, console, style="dim")


def headed(name: str, status: str) -> CleanText:
    """Returns the first line about a run: its name, and its status in the colour of the listing."""
    return CleanText(f"{name}: ", style="bold").append(status, STATUS_STYLES.get(status, ""))


def _fitting(titles: Sequence[str], widths: Mapping[str, int], width: int, first: Sequence[str]) -> list[str]:
    """Returns the columns that fit on a screen; a run's name has a separate line if necessary.

    Args:
        titles: All columns.
        widths: Their widths.
        width: Width of the screen.
        first: Columns to drop before all others.
    """
    columns = list(titles)
    for own_line in (False, True):
        columns = [title for title in titles if title != "run" or not own_line]
        for title in ("", *first, *_DISPENSABLE, *(_LAST_DISPENSABLE if own_line else ())):
            columns = [each for each in columns if each != title]
            if sum(widths[each] for each in columns) + len(_GAP) * (len(columns) - (not own_line)) <= width:
                return columns
    return columns


def span(seconds: float) -> str:
    """Formats a duration in the largest unit of at least one: ``3 h``."""
    length, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


def metric(name: str, value: float | str) -> str:
    """A metric as a person reads it: ``return 874.4``."""
    return f"{name.removeprefix('eval/')} {value if isinstance(value, str) else figure(value)}"


def progress(run: Mapping[str, Any]) -> str:
    """Returns the progress of a run, in its unit."""
    if run["goal"] is None:
        return _MISSING
    if run["step"] >= run["goal"]:
        return amount(run["step"], run["unit"])
    return f"{run['step']:,}/{run['goal']:,} {run['unit']}"


def _cells(run: Mapping[str, Any], indent: str) -> dict[str, str]:
    """Returns the text of each column."""
    cells = {
        "run": indent + run["name"],
        "kind": run["kind"] or _MISSING,
        "status": run["status"],
        "progress": progress(run),
        "objective": objective(run),
        "took": span(run["seconds"]) if run["seconds"] else _MISSING,
        "checkpoint": _MISSING if run["last_checkpoint"] is None else f"{run['last_checkpoint']:,}",
        "started": _MISSING if run["started"] is None else f"{span(max(0.0, time.time() - run['started']))} ago",
        "resume": "yes" if run["resumable"] else _MISSING if run["status"] == "FINISHED" else "no",
    }
    return {title: escape_line(redact(cell)) for title, cell in cells.items()}


def objective(run: Mapping[str, Any]) -> str:
    """Returns the first primary metric; of several seeds the mean with its interval."""
    metrics = run["metrics"] or {}
    first = next((name for name in run["headline"] or () if name in metrics), None)
    if first is None:
        return _MISSING
    value = metric(first, metrics[first])
    bounds = [figure(metrics[key], 3) for key in interval_keys(first) if key in metrics]
    return f"{value} [{', '.join(bounds)}]" if run["kind"] == "seeds" and bounds else value


def said(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields the user's tags and note."""
    if run["tags"]:
        yield escape_line("tags " + ", ".join(f"{name}={value}" for name, value in run["tags"].items()))
    if run["note"]:
        yield run["note"]


def _remarks(run: Mapping[str, Any], group: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields remarks below a run's line: overrides, tags and note, and errors.

    Remarks on the group are not repeated.
    """
    overrides, known = run["overrides"] or {}, group["overrides"] if group else {}
    if run["synthetic"]:
        yield f"data {SYNTHETIC_REMARK}"
    yield escape_line(" ".join(f"{path}={value}" for path, value in overrides.items() if known.get(path) != value))
    yield "; ".join(text for text in said(run) if group is None or text not in said(group))
    parts = []
    if run["status"] == "FAILED":
        parts.append(run["reason"].partition("\n")[0])
    if run["status"] != "FINISHED":
        parts.append(run["not_resumable"])
    if run["unsent_bytes"] and run["status"] in ("FINISHED", "FAILED", "KILLED"):
        parts.append("not completely in MLflow yet: runner sync")
    yield "; ".join(filter(None, parts))
