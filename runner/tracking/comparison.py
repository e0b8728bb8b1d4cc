"""What differs between runs: settings, then environment, then results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_OWN_TAGS = ("mlflow.", "recipe.", "run_dir")
"""Beginnings of tags that name a run or repeat its settings."""
_LOCKED = ("source", "code", "plugins", "packages", "tools", "hardware", "threads")
"""Sections of a lock beside the recipe itself."""


@dataclass(frozen=True)
class Comparison:
    """Values that differ between runs; every row has one value a run, None where a run has none."""

    runs: list[dict[str, str]]
    """``run_id``, ``name``, ``status`` and ``experiment_id`` of each run, in the order asked for."""
    settings: dict[str, list[str | None]]
    environment: dict[str, list[str | None]]
    metrics: dict[str, list[float | None]]
    """The last value of each metric."""
    link: str
    """MLflow's page that shows the runs side by side."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite are strings."""
        metrics = {
            name: [value if value is None or isfinite(value) else str(value) for value in values]
            for name, values in self.metrics.items()
        }
        return vars(self) | {"metrics": metrics}


def compare(workspace: Workspace, names: Sequence[str]) -> Comparison:
    """Compares runs of a workspace, each named as ``pick`` understands it; a ``UsageError`` if there are not two."""
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
    return Comparison(
        runs=[
            {"run_id": info.run_id, "name": info.run_name, "status": info.status, "experiment_id": info.experiment_id}
            for info in infos
        ],
        settings=redact_values(_differing([run.data.params for run in runs])),
        environment=redact_values(_differing([_environment(store.client, run) for run in runs])),
        metrics=_differing([run.data.metrics for run in runs]),
        link=f"{server}/#/compare-runs?{urlencode(page)}&{VIEW}",
    )


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
            locked |= {name: str(value) for name, value in flatten(values.get(section) or {}, f"{section}.")}
    return {"status": run.info.status, **tags, **locked}


def _differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = sorted({name for side in sides for name in side})
    rows = {name: [side.get(name) for side in sides] for name in names}
    return {name: row for name, row in rows.items() if len({repr(value) for value in row}) > 1}


def show(comparison: Comparison, console: Console) -> None:
    """Prints a comparison; runs that do not fit side by side follow in further tables."""
    per_table = max(1, (console.width - _NAME_WIDTH) // _RUN_WIDTH)
    parts: dict[str, Mapping[str, Sequence[Any]]] = {
        "settings": comparison.settings,
        "environment": comparison.environment,
        "metrics: last value (ratio to the first run)": comparison.metrics,
    }
    for start in range(0, len(comparison.runs), per_table):
        shown = range(start, min(start + per_table, len(comparison.runs)))
        for title, rows in parts.items():
            if not rows:
                console.print(f"{title.partition(':')[0]}: no difference", style="dim")
                continue
            table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("", overflow="fold")
            for run in shown:
                stem, _, digits = comparison.runs[run]["name"].rpartition("-")
                table.add_column(f"{stem}\n{digits}".strip(), overflow="fold")
            for name, row in rows.items():
                table.add_row(name, *(Text(_cell(row[run], row[0] if run else None)) for run in shown))
            console.print(table)
    console.print(comparison.link, soft_wrap=True, markup=False, highlight=False)


def _cell(value: object, reference: object) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if not isinstance(reference, float) or reference == 0 or not isfinite(value / reference):
        return f"{value:.6g}"
    return f"{value:.6g} ({value / reference:.3g}x)"
