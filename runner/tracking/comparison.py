"""What differs between runs: settings, then environment, then results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.recipe.document import read
from runner.recipe.lock import LOCK_NAME
from runner.recipe.recipe import flatten
from runner.system.errors import UsageError
from runner.system.secrets import redact_values
from runner.tracking.store import HOST, PORT, VIEW, Store, is_http, shown
from runner.tracking.workspace import Workspace, pick

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_NAME_WIDTH, _RUN_WIDTH = 28, 17
_NEWEST_FIRST = "attributes.start_time DESC"
_ABOUT_METRICS = ": last value (ratio to the first run)"
_OWN_TAGS = ("mlflow.", "recipe.", "overrides", "run_dir")
"""Beginnings of tags that name a run or repeat its settings."""
_LOCKED = ("source", "code", "plugins", "packages", "tools", "hardware", "threads")
"""Sections of a lock beside the recipe itself."""


def compare(workspace: Workspace, names: Sequence[str]) -> dict[str, Any]:
    """Compares runs of a workspace, each named as ``pick`` understands it; a ``UsageError`` if there are not two.

    Plain data: ``runs`` says which they are, in the order asked for; ``settings``, ``environment`` and ``metrics``, of
    which the last value counts, have a row for whatever differs, with one value a run, None where a run has none and
    text for a number that is not finite; ``link`` is MLflow's page that shows the runs side by side.
    """
    if len(names) < 2:
        raise UsageError("compare needs at least two runs, for example: runner compare marl_phase1 latest")
    store = Store(workspace)
    found = _all_runs(store.client)
    known = [(run.info.run_name, run.info.run_id) for run in found]
    runs = [found[pick(name, known, "the workspace")] for name in names]
    infos = [run.info for run in runs]
    run_ids = [info.run_id for info in infos]
    if len(set(run_ids)) < len(run_ids):
        raise UsageError(f"{', '.join(names)}: the same run is named twice")
    server = shown(store.uri).rstrip("/") if is_http(store.uri) else f"http://{HOST}:{PORT}"
    experiments = sorted({info.experiment_id for info in infos})
    page = {"runs": json.dumps(run_ids), "experiments": json.dumps(experiments)}
    metrics = [
        {name: value if isfinite(value) else str(value) for name, value in run.data.metrics.items()} for run in runs
    ]
    return {
        "runs": [
            {"run_id": info.run_id, "name": info.run_name, "status": info.status, "experiment_id": info.experiment_id}
            for info in infos
        ],
        "settings": redact_values(_differing([run.data.params for run in runs])),
        "environment": redact_values(_differing([_environment(store.client, run) for run in runs])),
        "metrics": _differing(metrics),
        "link": f"{server}/#/compare-runs?{urlencode(page)}&{VIEW}",
    }


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
    return {"status": run.info.status, **tags, **locked}


def _differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = sorted({name for side in sides for name in side})
    rows = {name: [side.get(name) for side in sides] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def show(comparison: Mapping[str, Any], console: Console) -> None:
    """Prints a comparison; runs that do not fit side by side follow in further tables."""
    runs, per_table = comparison["runs"], max(1, (console.width - _NAME_WIDTH) // _RUN_WIDTH)
    for start in range(0, len(runs), per_table):
        shown = range(start, min(start + per_table, len(runs)))
        for title, about in {"settings": "", "environment": "", "metrics": _ABOUT_METRICS}.items():
            rows = comparison[title]
            if not rows:
                console.print(f"{title}: no difference", style="dim")
                continue
            table = Table(
                title=title + about, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
            )
            table.add_column("", overflow="fold")
            for run in shown:
                stem, _, digits = runs[run]["name"].rpartition("-")
                table.add_column(f"{stem}\n{digits}".strip(), overflow="fold")
            for name, row in rows.items():
                table.add_row(name, *(Text(_cell(row[run], row[0] if run else None)) for run in shown))
            console.print(table)
    console.print(comparison["link"], soft_wrap=True, markup=False, highlight=False)


def _cell(value: object, reference: object) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if not isinstance(reference, float) or reference == 0 or not isfinite(value / reference):
        return f"{value:.6g}"
    return f"{value:.6g} ({value / reference:.3g}x)"
