"""What differs between runs: settings, then environment, then results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rich import box
from rich.table import Table

from runner.recipe.document import read
from runner.recipe.recipe import flatten
from runner.system.console import CleanText, Console
from runner.system.errors import UsageError
from runner.system.lines import print_wrapped
from runner.system.places import LOCK_NAME
from runner.system.secrets import redact_values
from runner.tracking.store import HEADLINE, HOST, PORT, VIEW, Store, is_http, shown
from runner.tracking.workspace import Workspace, pick

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_NAME_WIDTH, _RUN_WIDTH, _BETWEEN = 28, 14, 3
_NEWEST_FIRST = "attributes.start_time DESC"
_SECTIONS = ("headline", "settings", "environment", "metrics")
_ABOUT = dict.fromkeys(("headline", "metrics"), ": last value (ratio or difference to the first run)")
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b")
_LIST = re.compile(r",(?=\S)")
_NOISE = ("perf/", "system/", "process.", "resumed.", "source.", "tools.")
"""Beginnings of what is another every time, or cannot matter: what code is run is told by its digest."""
_OWN_TAGS = ("mlflow.", "recipe.", "overrides", "run_dir")
"""Beginnings of tags that name a run or repeat its settings."""
_LOCKED = ("source", "code", "plugins", "packages", "tools", "hardware", "threads")
"""Sections of a lock beside the recipe itself."""


def compare(workspace: Workspace, names: Sequence[str]) -> dict[str, Any]:
    """Compares runs of a workspace, each named as ``pick`` understands it; a ``UsageError`` if there are not two.

    Plain data: ``runs`` says which they are, in the order asked for; ``settings``, ``environment`` and ``metrics``, of
    which the last value counts, have a row for whatever differs, with one value a run, None where a run has none and
    text for a number that is not finite; ``link`` is MLflow's page with their learning
    curves; or, where they are of several experiments, with what they came to.
    """
    if len(names) < 2:
        raise UsageError("compare needs at least two runs, for example: runner compare marl_phase1 latest")
    store = Store(workspace, reading=True)
    found = _all_runs(store.client)
    known = [(run.info.run_name, run.info.run_id) for run in found]
    runs = [found[pick(name, known, "the workspace")] for name in names]
    infos = [run.info for run in runs]
    run_ids = [info.run_id for info in infos]
    if len(set(run_ids)) < len(run_ids):
        raise UsageError(f"{', '.join(names)}: the same run is named twice")
    server = shown(store.uri).rstrip("/") if is_http(store.uri) else f"http://{HOST}:{PORT}"
    experiments = sorted({info.experiment_id for info in infos})
    metrics = [
        {name: value if isfinite(value) else str(value) for name, value in run.data.metrics.items()} for run in runs
    ]
    return {
        "runs": [
            {"run_id": info.run_id, "name": info.run_name, "status": info.status, "experiment_id": info.experiment_id}
            for info in infos
        ],
        "headline": _rows(metrics, dict.fromkeys(",".join(run.data.tags.get(HEADLINE, "") for run in runs).split(","))),
        "settings": redact_values(_differing([run.data.params for run in runs])),
        "environment": redact_values(_differing([_environment(store.client, run) for run in runs])),
        "metrics": _differing(metrics),
        "link": f"{server}/#/{_page(run_ids, experiments)}&{VIEW}",
    }


def _page(run_ids: Sequence[str], experiments: Sequence[str]) -> str:
    """Of one experiment, the page has curves; what it says of several is what they came to.

    In the order of their beginning, the page would fold the seeds of a group below it and draw the group instead.
    """
    if len(experiments) > 1:
        return f"compare-runs?{urlencode({'runs': json.dumps(run_ids), 'experiments': json.dumps(experiments)})}"
    chosen = ",".join(f"'{run_id}'" for run_id in run_ids)
    order = {"orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"}
    shown = {"searchFilter": f"attributes.run_id IN ({chosen})", **order, "compareRunsMode": "CHART"}
    return f"experiments/{experiments[0]}/runs?{urlencode(shown)}"


def _all_runs(client: MlflowClient) -> list[Run]:
    """All runs, the newest first."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, order_by=[_NEWEST_FIRST])
    runs = list(found)
    while found.token:
        found = client.search_runs(experiments, order_by=[_NEWEST_FIRST], page_token=found.token)
        runs += found
    return runs


def _environment(client: MlflowClient, run: Run) -> dict[str, str]:
    """Where and from what the run was made: its tags, and its lock if it has one."""
    from mlflow.exceptions import MlflowException

    tags = {name: value for name, value in run.data.tags.items() if not name.startswith(_OWN_TAGS)}
    locked: dict[str, str] = {}
    with TemporaryDirectory() as folder, suppress(MlflowException, OSError):
        values = read(Path(client.download_artifacts(run.info.run_id, LOCK_NAME, folder)), []).plain()
        for section in _LOCKED:
            locked |= {name: str(value) for name, value in flatten(values.get(section) or {}, section)}
        choices = (values.get("tuning") or {}).get("choices") or {}
        locked |= {name: str(value) for name, value in flatten(choices, "tuning")}
    return {"status": run.info.status, **tags, **locked}


def _differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = _rows(sides, sorted({name for side in sides for name in side}))
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def _rows(sides: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """What each side has under these names, as far as one of them has it."""
    rows = {name: [side.get(name) for side in sides] for name in names}
    return {name: row for name, row in rows.items() if row != [None] * len(sides)}


def show(comparison: Mapping[str, Any], everything: bool, console: Console) -> None:
    """Prints a comparison, without noise unless everything is asked for.

    Runs that do not fit side by side follow in further tables; a row that does not fit into one stands below it.
    """
    runs = comparison["runs"]
    longest = max(len(part) for run in runs for part in run["name"].rpartition("-"))
    per_table = max(1, (console.width - _NAME_WIDTH) // (max(_RUN_WIDTH, longest) + _BETWEEN))
    sections, hidden = {}, 0
    for section in _SECTIONS:
        rows = comparison[section]
        if section != "headline":
            rows = {name: row for name, row in rows.items() if name not in comparison["headline"]}
        sections[section] = {n: row for n, row in rows.items() if everything or not n.startswith(_NOISE)}
        hidden += len(rows) - len(sections[section])
    for start in range(0, len(runs), per_table):
        shown = range(start, min(start + per_table, len(runs)))
        for section, rows in sections.items():
            if rows:
                console.print(CleanText(section + _ABOUT.get(section, ""), style="bold"), soft_wrap=True)
                _print_rows(rows, runs, shown, console)
            elif section != "headline":
                console.print(f"{section}: no difference", style="dim")
    if hidden:
        console.print(f"{hidden} differences of speed, process and the like: --all", style="dim", highlight=False)
    console.print(comparison["link"], soft_wrap=True, highlight=False)


def _print_rows(
    rows: Mapping[str, list[Any]], runs: Sequence[Mapping[str, Any]], shown: Sequence[int], console: Console
) -> None:
    """Some of the runs, a row for each name; where a word would not fit into its column, a line for each run."""
    cells = {name: [_cell(row, run) for run in shown] for name, row in rows.items()}
    widest = console.width - len(shown) * (_RUN_WIDTH + _BETWEEN)
    names = max((len(name) for name in cells if len(name) <= max(_NAME_WIDTH, widest)), default=0)
    column = (console.width - names) // len(shown) - _BETWEEN
    fitting = {
        name: row
        for name, row in cells.items()
        if len(name) <= names and all(len(word) <= column for cell in row for word in cell.split())
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", width=names, no_wrap=True)
    for run in shown:
        stem, _, digits = runs[run]["name"].rpartition("-")
        table.add_column(f"{stem}\n{digits}".strip(), max_width=column, overflow="fold")
    for name, row in fitting.items():
        table.add_row(name, *map(CleanText, row))
    if fitting:
        console.print(table)
    for name in (name for name in cells if name not in fitting):
        console.print(CleanText(name), soft_wrap=True)
        for run, cell in zip(shown, cells[name], strict=True):
            print_wrapped(f"    {runs[run]['name']}: {cell}", console, hang=4)


def _cell(row: Sequence[Any], run: int) -> str:
    """A value, beside the first one: how many times as large where all are positive, else how much larger."""
    value, reference = row[run], row[0]
    if not isinstance(value, float):
        return "-" if value is None else _DIGEST.sub(r"\1", _LIST.sub(", ", str(value)))
    if run == 0 or value == reference or not isinstance(reference, float):
        return f"{value:.6g}"
    if all(each > 0 for each in row if isinstance(each, float)) and isfinite(value / reference):
        return f"{value:.6g} ({value / reference:.3g}x)"
    return f"{value:.6g} ({value - reference:+.3g})"
