"""Summary of one run, ablation, study or group of runs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.system.console import CleanText, Console
from runner.system.synthetic import SMOKE_REMARK, SYNTHETIC_REMARK
from runner.system.text_lines import figure, labelled
from runner.tracking.keys import interval_keys
from runner.tracking.listing import headed, metric, objective, progress, span, tags_and_note
from runner.tracking.record import REPEATED
from runner.tracking.seeds import PICTURE

_LABEL = 10
"""Columns of the labels."""
_MOST = 12
"""Displayed metrics in addition to the evaluation's; all are in ``run.json``."""


def show(run: Mapping[str, Any], below: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints the result of ``listing.described`` for a run, and the runs below it
    if it is a group.
    """
    print_sections(run["name"], run["status"], _sections(run, below), console)


def print_sections(name: str, status: str, sections: Mapping[str, Sequence[str]], console: Console) -> None:
    """Prints the name and status of a run, and the lines of every section behind its label."""
    console.print(headed(name, status), soft_wrap=True)
    for label, lines in sections.items():
        for first_column, text in labelled(f"{label:{_LABEL}}", lines, console.width):
            console.print(CleanText.assemble((first_column, "bold"), text), soft_wrap=True)


def _sections(run: Mapping[str, Any], below: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns the lines of the summary by label."""
    settings = [f"{path}={value}" for path, value in (run["overrides"] or {}).items()]
    run_id = [f"MLflow id {run['run_id']}"] if run["run_id"] else []
    return {
        "reason": run["reason"].splitlines() if run["reason"] else [],
        "recipe": [run["recipe"]] if run["recipe"] else [],
        "data": [SYNTHETIC_REMARK] if run["synthetic"] else [],
        "smoke": [SMOKE_REMARK] if run["smoke"] else [],
        "callbacks": [run["changed_by"]] if run["changed_by"] else [],
        "settings": settings or ["as in the recipe"],
        "tags": list(tags_and_note(run)),
        "result": list(_result(run)),
        "training": list(_training(run)),
        "runs": list(_runs(run, below)),
        "progress": list(_progress(run)),
        "run": [*run_id, run["run_dir"]],
        "next": list(_next(run)),
    }


def _result(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields the newest evaluation, headline first, and the test."""
    metrics = run["metrics"] or {}
    headline = [name for name in run["headline"] or () if name in metrics]
    names = sorted(metrics)
    if run["kind"] == "run":
        names = [name for name in names if name.startswith(("eval/", "test/"))]
    ordered_names = dict.fromkeys([*headline, *names])
    intervals = {name: interval_keys(name) for name in ordered_names if run["kind"] in REPEATED}
    # The bounds of an interval are shown with their metric.
    bound_names = {key for keys in intervals.values() for key in keys}
    for name in ordered_names:
        if name in bound_names:
            continue
        bounds = [figure(metrics[key]) for key in intervals.get(name, ()) if key in metrics]
        interval = f" [{', '.join(bounds)}]" if bounds else ""
        yield f"{metric(name, metrics[name])}{interval}"


def _runs(run: Mapping[str, Any], below: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the runs of a group by seed or fold, those of a grid with their settings."""
    if not below:
        return
    numbers = {digest: number for number, digest in run["digests"].items()}
    word = "run" if run["kind"] == "grid" else run["kind"].removesuffix("s")
    for member in below:
        number = numbers.get(member["digest"], "?")
        settings = _varied(run, member) if run["kind"] == "grid" else ""
        yield f"{member['name']}: {word} {number}{settings}, {member['status']}, {objective(member)}"


def _varied(run: Mapping[str, Any], member: Mapping[str, Any]) -> str:
    """Returns the settings that a run of a grid has in addition to those of the grid."""
    shared = run["overrides"] or {}
    overrides = member["overrides"] or {}
    return "".join(f", {path}={value}" for path, value in overrides.items() if shared.get(path) != value)


def _training(run: Mapping[str, Any]) -> Iterator[str]:
    """Losses and the like, of a run."""
    metrics = run["metrics"] or {}
    if run["kind"] == "run":
        names = sorted(name for name in metrics if name.startswith("train/"))
        for name in names[:_MOST]:
            yield metric(name.removeprefix("train/"), metrics[name])
    if "perf/update_ms" in metrics:
        yield f"{figure(metrics['perf/update_ms'], 3)} ms per update"


def _progress(run: Mapping[str, Any]) -> Iterator[str]:
    if run["goal"] is not None:
        together = f" by {run['processes']} processes" if (run["processes"] or 1) > 1 else ""
        yield f"{progress(run)} in {span(run['seconds'])}{together}"
    if run["last_checkpoint"] is not None:
        yield f"last checkpoint at {run['last_checkpoint']:,}"
    if run["started"] is not None:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        # Another machine's clock may be ahead.
        age = max(0.0, time.time() - run["started"])
        yield f"started {date}, {span(age)} ago"


def _next(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields the commands for a run."""
    digits = run["name"].rpartition("-")[2]
    if run["unsent_bytes"] and run["status"] != "RUNNING":
        yield f"runner sync {digits}"
    if run["kind"] == "study":
        yield f"runner study show {run['name']}"
    elif run["kind"] == "ablation":
        yield f"its report: {run['run_dir']}/README.md"
    elif run["kind"] in REPEATED:
        yield f"its curves: {run['run_dir']}/{PICTURE}.png"
        if run["status"] == "FINISHED":
            yield f"runner compare {digits} OTHER_GROUP"
    elif run["resumable"]:
        yield f"runner resume {run['name']}"
    elif run["status"] == "FINISHED" and run["kind"] == "run":
        yield f"runner compare {digits} OTHER_RUN"
    if run["not_resumable"] and run["status"] != "FINISHED":
        yield run["not_resumable"]
