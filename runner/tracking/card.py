"""Summary of one run, ablation, study or group of seeds."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.system.console import CleanText, Console
from runner.system.lines import figure, labelled
from runner.system.synthetic import SYNTHETIC_REMARK
from runner.tracking.keys import interval_keys
from runner.tracking.listing import headed, metric, objective, progress, said, span
from runner.tracking.seeds import PICTURE

_MEASURED = ("perf/", "system/")
_LABEL = 10
"""Columns of the labels."""
_MOST = 12
"""Displayed metrics in addition to the evaluation's; all are in ``run.json``."""


def show(run: Mapping[str, Any], below: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints the result of ``listing.described`` for a run, and the runs below it
    if it is a group of seeds.
    """
    console.print(headed(run["name"], run["status"]), soft_wrap=True)
    for label, lines in (
        ("reason", run["reason"].splitlines() if run["reason"] else []),
        ("recipe", [run["recipe"]] if run["recipe"] else []),
        ("data", [SYNTHETIC_REMARK] if run["synthetic"] else []),
        ("settings", [f"{path}={value}" for path, value in (run["overrides"] or {}).items()] or ["as in the recipe"]),
        ("tags", list(said(run))),
        ("result", list(_learnt(run))),
        ("training", list(_training(run))),
        ("runs", list(_runs(run, below))),
        ("progress", list(_progress(run))),
        ("run", [*([f"MLflow id {run['run_id']}"] if run["run_id"] else []), run["run_dir"]]),
        ("next", list(_next(run))),
    ):
        for beginning, part in labelled(f"{label:{_LABEL}}", lines, console.width):
            console.print(CleanText.assemble((beginning, "bold"), part), soft_wrap=True)


def _learnt(run: Mapping[str, Any]) -> Iterator[str]:
    """The newest evaluation, headline first."""
    metrics = run["metrics"] or {}
    first = [name for name in run["headline"] or () if name in metrics]
    judged = [name for name in sorted(metrics) if run["kind"] != "run" or name.startswith("eval/")]
    shown = dict.fromkeys([*first, *judged])
    intervals = {name: interval_keys(name) for name in shown if run["kind"] == "seeds"}
    bound_names = {key for keys in intervals.values() for key in keys}
    for name in shown:
        if name in bound_names:
            continue
        bounds = [figure(metrics[key]) for key in intervals.get(name, ()) if key in metrics]
        interval = f" [{', '.join(bounds)}]" if bounds else ""
        yield f"{metric(name, metrics[name])}{interval}"


def _runs(run: Mapping[str, Any], below: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the runs of a group of seeds."""
    seeds = {digest: seed for seed, digest in (run["digests"] or {}).items()}
    for each in below:
        yield f"{each['name']}: seed {seeds.get(each['digest'], '?')}, {each['status']}, {objective(each)}"


def _training(run: Mapping[str, Any]) -> Iterator[str]:
    """Losses and the like, of a run."""
    metrics = {name: value for name, value in (run["metrics"] or {}).items() if name.startswith("train/")}
    for name in sorted(metrics)[:_MOST] if run["kind"] == "run" else ():
        yield metric(name.removeprefix("train/"), metrics[name])
    if "perf/update_ms" in (run["metrics"] or {}):
        yield f"{figure(run['metrics']['perf/update_ms'], 3)} ms per update"


def _progress(run: Mapping[str, Any]) -> Iterator[str]:
    if run["goal"] is not None:
        yield f"{progress(run)} in {span(run['seconds'])}"
    if run["last_checkpoint"] is not None:
        yield f"last checkpoint at {run['last_checkpoint']:,}"
    if run["started"] is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["started"]))
        yield f"started {when}, {span(max(0.0, time.time() - run['started']))} ago"


def _next(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields the commands for a run."""
    digits = run["name"].rpartition("-")[2]
    if run["unsent_bytes"] and run["status"] != "RUNNING":
        yield f"runner sync {digits}"
    if run["kind"] == "study":
        yield f"runner study show {run['name']}"
    elif run["kind"] == "ablation":
        yield f"its report: {run['run_dir']}/README.md"
    elif run["kind"] == "seeds":
        yield f"its curves: {run['run_dir']}/{PICTURE}.png"
        if run["status"] == "FINISHED":
            yield f"runner compare {digits} OTHER_GROUP"
    elif run["resumable"]:
        yield f"runner resume {run['name']}"
    elif run["status"] == "FINISHED":
        yield f"runner compare {digits} OTHER_RUN"
    if run["not_resumable"] and run["status"] != "FINISHED":
        yield run["not_resumable"]
