"""What a person wants to know of one run, ablation or study."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.tracking.listing import figure, progress, said, span

_MEASURED = ("perf/", "system/")
_MOST = 12
"""Metrics beside the evaluation's that are shown; all are in ``run.json``."""


def show(run: Mapping[str, Any], console: Console) -> None:
    """Prints what ``listing.described`` knows of a run."""
    table = Table(title=Text(f"{run['name']}: {run['status']}"), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines in (
        ("reason", run["reason"].splitlines() if run["reason"] else []),
        ("recipe", [run["recipe"]] if run["recipe"] else []),
        ("settings", [f"{path}={value}" for path, value in (run["overrides"] or {}).items()] or ["as in the recipe"]),
        ("said", list(said(run))),
        ("learnt" if run["kind"] == "run" else "result", list(_learnt(run))),
        ("training", list(_training(run))),
        ("progress", list(_progress(run))),
        ("run", [*([f"MLflow id {run['run_id']}"] if run["run_id"] else []), run["run_dir"]]),
        ("next", list(_next(run))),
    ):
        if lines:
            table.add_row(label, Text("\n".join(lines)))
    console.print(table)


def _learnt(run: Mapping[str, Any]) -> Iterator[str]:
    """The newest evaluation, headline first."""
    metrics = run["metrics"] or {}
    first = [name for name in run["headline"] or () if name in metrics]
    judged = [name for name in sorted(metrics) if run["kind"] != "run" or name.startswith("eval/")]
    for name in dict.fromkeys([*first, *judged]):
        yield figure(name, metrics[name])


def _training(run: Mapping[str, Any]) -> Iterator[str]:
    """Losses and the like, of a run."""
    metrics = {name: value for name, value in (run["metrics"] or {}).items() if name.startswith("train/")}
    for name in sorted(metrics)[:_MOST] if run["kind"] == "run" else ():
        yield figure(name.removeprefix("train/"), metrics[name])
    if "perf/update_ms" in (run["metrics"] or {}):
        yield f"{run['metrics']['perf/update_ms']:.3g} ms per update"


def _progress(run: Mapping[str, Any]) -> Iterator[str]:
    if run["goal"] is not None:
        yield f"{progress(run)} in {span(run['seconds'])}"
    if run["last_checkpoint"] is not None:
        yield f"last checkpoint at {run['last_checkpoint']:,}"
    if run["started"] is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        yield f"begun {when}, {span(max(0.0, time.time() - run['started']))} ago"


def _next(run: Mapping[str, Any]) -> Iterator[str]:
    """What can be done with it."""
    digits = run["name"].rpartition("-")[2]
    if run["unsent_bytes"] and run["status"] != "RUNNING":
        yield f"runner sync {digits}"
    if run["kind"] == "study":
        yield f"runner study show {run['name']}"
    elif run["kind"] == "ablation":
        yield f"its report: {run['run_dir']}/README.md"
    elif run["resumable"]:
        yield f"runner resume {run['name']}"
    elif run["status"] == "FINISHED":
        yield f"runner compare {digits} OTHER_RUN"
    if run["not_resumable"] and run["status"] != "FINISHED":
        yield run["not_resumable"]
