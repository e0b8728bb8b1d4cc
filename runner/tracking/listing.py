"""Runs, ablations, studies and groups of seeds of a workspace, as ``runner ls`` shows them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from rich.cells import cell_len

from runner.recipe.smoke import SETTINGS
from runner.system.console import CleanText, Console
from runner.system.escapes import escape_line
from runner.system.secrets import redact
from runner.system.stored_json import json_number
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import amount, figure, print_wrapped
from runner.tracking.keys import interval_keys
from runner.tracking.lookup import folders
from runner.tracking.record import GROUPS, Record, Status
from runner.tracking.selection import SECONDS
from runner.tracking.spool import unsent
from runner.tracking.workspace import RunFolder, Workspace

STATUS_STYLES = {
    "RUNNING": "cyan",
    "FINISHED": "green",
    "FAILED": "red",
    "STOPPED": "yellow",
    "PREEMPTED": "yellow",
    "KILLED": "red",
}
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
    descriptions = [described(folder) for folder in folders(workspace.runs)]
    for path in (workspace.ablations, workspace.studies, workspace.seeds):
        # Folders that were laid aside have no valid record.
        descriptions += [described(folder) for folder in folders(path) if folder.record()]
    descriptions.sort(key=lambda run: (run["started"] or 0.0, run["name"]))

    members: dict[str, list[dict[str, Any]]] = {run["name"]: [] for run in descriptions if run["kind"] in GROUPS}
    top_level = []
    for run in descriptions:
        if run["group"] in members:
            members[run["group"]].append(run)
        else:
            top_level.append(run)

    ordered = []
    for run in reversed(top_level):
        ordered += [run, *members.get(run["name"], ())]
    return ordered


def described(folder: RunFolder) -> dict[str, Any]:
    """Returns the description of one folder."""
    record = folder.record()
    last_checkpoint = folder.last_checkpoint
    obstacle = folder.resumable
    values: dict[str, Any] = dict.fromkeys(Record.model_fields)
    values["status"] = "UNKNOWN"
    if record is not None:
        workspace = Workspace(folder.path.parents[1])
        values = record.model_dump(mode="json")
        values["tracking_uri"] = workspace.resolved_uri(record.tracking_uri)
        values["step"] = max(record.step, last_checkpoint or 0)
        values["metrics"] = {name: json_number(value) for name, value in record.metrics.items()}
        if record.kind != "run":
            values["status"] = _status_of_group(record)
            obstacle = _obstacle_of_group(record)
    return values | {
        "name": folder.name,
        "run_dir": str(folder.path),
        "last_checkpoint": last_checkpoint,
        "resumable": not obstacle,
        "not_resumable": obstacle,
        "unsent_bytes": unsent(folder.spool),
    }


def _status_of_group(record: Record) -> str:
    """Returns the status of an ablation, a study or a group of seeds, which no ``reap`` completes."""
    if record.status == "RUNNING" and not record.at_work:
        return "KILLED"
    return record.status


def _obstacle_of_group(record: Record) -> str:
    """Returns why ``runner resume`` does not resume an ablation, a study or a group of seeds."""
    if record.at_work:
        return f"process {record.owner.pid} on {record.owner.host} is at it"
    if record.status == "FINISHED":
        return "it is finished"
    return _SEEDS_AGAIN if record.kind in GROUPS else _AGAIN


def show(runs: Sequence[Mapping[str, Any]], none: str, console: Console) -> None:
    """Prints a line for each run with remarks below it; names are never broken.

    ``none`` is printed if a selection has no runs.
    """
    if not runs:
        text = none or "no runs yet; start one: runner run marl_phase2"
        console.print(text, highlight=False)
        return
    groups = {run["name"]: run for run in runs if run["kind"] in GROUPS}
    rows = [_cells(run, _GAP if run["group"] in groups else "") for run in runs]
    header = {title: title for title in rows[0]}
    rows.insert(0, header)
    widths = {title: max(cell_len(row[title]) for row in rows) for title in header}
    # Where all are runs, or nothing can be resumed, a column has no information.
    has_kinds = bool({run["kind"] for run in runs} - {"run", None})
    titles = [title for title in header if title != "kind" or has_kinds]
    useless = () if any(run["resumable"] for run in runs) else ("resume",)
    columns = _fitting(titles, widths, console.width, useless)

    for run, row in zip([None, *runs], rows, strict=True):
        line = _line(row, columns, widths, style="" if run else "bold")
        console.print(line, soft_wrap=True)
        remarks = _remarks(run, groups.get(run["group"])) if run else ()
        for text in filter(None, remarks):
            print_wrapped(2 * _GAP + text, console, style="dim")


def _line(row: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int], style: str) -> CleanText:
    """Returns the columns of a row; a name without a column is in a separate line above."""
    line = CleanText("" if "run" in columns else f"{row['run']}\n{_GAP}", style=style)
    for title in columns:
        cell = row[title]
        padding = " " * (widths[title] - cell_len(cell))
        cell_style = STATUS_STYLES.get(cell, "") if title == "status" else ""
        line.append(cell + padding + _GAP, cell_style)
    line.rstrip()
    return line


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
    for has_separate_names in (False, True):
        columns = [title for title in titles if title != "run" or not has_separate_names]
        dispensable = [*first, *_DISPENSABLE]
        if has_separate_names:
            dispensable += _LAST_DISPENSABLE
        # The empty title drops no column: the first attempt is with all of them.
        for dropped in ("", *dispensable):
            columns = [title for title in columns if title != dropped]
            # A line with a separate name is indented by one gap.
            gaps = len(columns) if has_separate_names else len(columns) - 1
            if sum(widths[title] for title in columns) + len(_GAP) * gaps <= width:
                return columns
    return columns


def span(seconds: float) -> str:
    """Formats a duration in the largest unit of at least one: ``3 h``."""
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), _UNITS[-1])
    return f"{seconds / length:.0f} {unit}"


def metric(name: str, value: float | str) -> str:
    """A metric as a person reads it: ``return 874.4``."""
    number = value if isinstance(value, str) else figure(value)
    return f"{name.removeprefix('eval/')} {number}"


def progress(run: Mapping[str, Any]) -> str:
    """Returns the progress of a run, in its unit."""
    if run["goal"] is None:
        return _MISSING
    if run["step"] >= run["goal"]:
        return amount(run["step"], run["unit"])
    return f"{run['step']:,}/{run['goal']:,} {run['unit']}"


def _cells(run: Mapping[str, Any], indent: str) -> dict[str, str]:
    """Returns the text of each column."""
    started = _MISSING
    if run["started"] is not None:
        # Another machine's clock may be ahead.
        age = max(0.0, time.time() - run["started"])
        started = f"{span(age)} ago"
    resume = "yes" if run["resumable"] else "no"
    if run["status"] == "FINISHED" and not run["resumable"]:
        resume = _MISSING
    cells = {
        "run": indent + run["name"],
        "kind": run["kind"] or _MISSING,
        "status": run["status"],
        "progress": progress(run),
        "objective": objective(run),
        "took": span(run["seconds"]) if run["seconds"] else _MISSING,
        "checkpoint": _MISSING if run["last_checkpoint"] is None else f"{run['last_checkpoint']:,}",
        "started": started,
        "resume": resume,
    }
    return {title: escape_line(redact(cell)) for title, cell in cells.items()}


def objective(run: Mapping[str, Any]) -> str:
    """Returns the first primary metric; of several seeds the mean with its interval."""
    metrics = run["metrics"] or {}
    name = next((name for name in run["headline"] or () if name in metrics), None)
    if name is None:
        return _MISSING
    value = metric(name, metrics[name])
    if run["kind"] != "seeds":
        return value
    bounds = [figure(metrics[key], 3) for key in interval_keys(name) if key in metrics]
    return f"{value} [{', '.join(bounds)}]" if bounds else value


def tags_and_note(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields the user's tags and note."""
    if run["tags"]:
        tags = ", ".join(f"{name}={value}" for name, value in run["tags"].items())
        yield escape_line(f"tags {tags}")
    if run["note"]:
        yield run["note"]


def _remarks(run: Mapping[str, Any], group: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields remarks below a run's line: overrides, tags and note, and errors.

    Remarks on the group are not repeated.
    """
    if run["synthetic"]:
        yield f"data {SYNTHETIC_REMARK}"
    if run["smoke"]:
        yield f"smoke test: {SMOKE_REMARK}"
    overrides = run["overrides"] or {}
    group_overrides = group["overrides"] if group else {}
    # The user did not write the settings of a smoke test.
    hidden = SETTINGS if run["smoke"] else ()
    settings = [
        f"{path}={value}"
        for path, value in overrides.items()
        if path not in hidden and group_overrides.get(path) != value
    ]
    yield escape_line(" ".join(settings))
    group_texts = list(tags_and_note(group)) if group else []
    yield "; ".join(text for text in tags_and_note(run) if text not in group_texts)

    problems = []
    if run["status"] == "FAILED":
        problems.append(run["reason"].partition("\n")[0])
    if run["status"] != "FINISHED":
        problems.append(run["not_resumable"])
    if run["unsent_bytes"] and run["status"] in get_args(Status):
        problems.append("not completely in MLflow yet: runner sync")
    yield "; ".join(filter(None, problems))
