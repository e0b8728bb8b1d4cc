"""Differences between runs: settings, tags, environment, results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from runner.recipe.recipe import flatten
from runner.recipe.yaml_nodes import read
from runner.system.errors import UsageError
from runner.system.secrets import redact_values
from runner.system.stored_json import json_number
from runner.system.synthetic import DATA_TAG, SMOKE_TAG, SYNTHETIC
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking.access import is_http
from runner.tracking.lookup import pick
from runner.tracking.spool import unsent
from runner.tracking.store import HEADLINE, HOST, OBJECTIVE, PORT, STATUS, USER_TAGS, VIEW, Store, shown
from runner.tracking.workspace import RunFolder, Workspace, folder_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_NEWEST_FIRST = "attributes.start_time DESC"
_OWN_TAGS = ("mlflow.", "recipe.", "overrides", "run_dir")
"""Beginnings of tags that name a run or repeat its settings."""
_LOCKED = ("source", "code", "plugins", "packages", "tools", "hardware", "threads")
"""Sections of a lock without the recipe."""


def compare(workspace: Workspace, names: Sequence[str]) -> dict[str, Any]:
    """Compares runs of a workspace, each named as ``pick`` understands it; a ``UsageError`` if there are not two.

    Plain data: ``runs`` in the order of the names, with ``unsent_bytes`` of their logs; ``settings``,
    ``tags``, ``environment`` and ``metrics`` (last values) have a row for whatever differs, with one
    value a run, None where a run has none and text for a number that is not finite; ``objective`` is
    the metric that decides and its direction, if all runs have the same; ``link`` is MLflow's page
    with their learning curves, or with their results if they are of several experiments; ``served``
    is whether an MLflow server has that page now.
    """
    if len(names) < 2:
        raise UsageError("compare needs at least two runs, for example: runner compare marl_phase1 latest")
    store = Store(workspace, reading=True)
    all_runs = _all_runs(store.client)
    candidates = [(run.info.run_name, run.info.run_id) for run in all_runs]
    runs = [all_runs[pick(name, candidates, "the workspace")] for name in names]
    run_ids = [run.info.run_id for run in runs]
    if len(set(run_ids)) < len(run_ids):
        raise UsageError(f"the same run is named twice: {', '.join(names)}")

    server = shown(store.uri).rstrip("/") if is_http(store.uri) else f"http://{HOST}:{PORT}"
    experiments = sorted({run.info.experiment_id for run in runs})
    metrics = [_metrics(run) for run in runs]
    headlines = ",".join(run.data.tags.get(HEADLINE, "") for run in runs)
    return {
        "runs": [_identity(run, workspace) for run in runs],
        "headline": _rows(metrics, dict.fromkeys(headlines.split(","))),
        "objective": _objective(runs),
        "settings": redact_values(_differing([run.data.params for run in runs])),
        "tags": redact_values(_differing([_user_tags(run) for run in runs])),
        "environment": redact_values(_differing([_environment(store.client, run) for run in runs])),
        "metrics": _differing(metrics),
        "served": is_http(store.uri),
        "link": f"{server}/#/{_page(run_ids, experiments)}&{VIEW}",
    }


def _identity(run: Run, workspace: Workspace) -> dict[str, Any]:
    folder = RunFolder(workspace.runs / folder_name(str(run.info.run_name)))
    return {
        "run_id": run.info.run_id,
        "name": run.info.run_name,
        "status": run.data.tags.get(STATUS, run.info.status),
        "experiment_id": run.info.experiment_id,
        "synthetic": run.data.tags.get(DATA_TAG) == SYNTHETIC,
        "smoke": SMOKE_TAG in run.data.tags,
        # Lines that were not sent may contain later values of every metric.
        "unsent_bytes": 0 if folder.alive() else unsent(folder.spool),
    }


def _metrics(run: Run) -> dict[str, float | str]:
    """Returns the last values; one that is not finite, for which JSON has no form, as text."""
    return {name: json_number(value) for name, value in run.data.metrics.items()}


def _objective(runs: Sequence[Run]) -> list[str] | None:
    """Returns direction and name of the metric that decides, if all runs have the same."""
    objectives = {run.data.tags.get(OBJECTIVE) for run in runs}
    objective = objectives.pop()
    return None if objectives or objective is None else objective.split(" ", 1)


def _user_tags(run: Run) -> dict[str, str]:
    """Returns the tags that the user gave to a run."""
    names = run.data.tags.get(USER_TAGS, "").split(",")
    return {name: value for name, value in run.data.tags.items() if name in names}


def _page(run_ids: Sequence[str], experiments: Sequence[str]) -> str:
    """Returns the address of a page: with curves for one experiment, with final values for several.

    In the order of their beginning, the page would fold the seeds of a group below it and draw the group instead.
    """
    if len(experiments) > 1:
        query = {"runs": json.dumps(run_ids), "experiments": json.dumps(experiments)}
        return f"compare-runs?{urlencode(query)}"
    quoted_ids = ",".join(f"'{run_id}'" for run_id in run_ids)
    query = {
        "searchFilter": f"attributes.run_id IN ({quoted_ids})",
        "orderByKey": "tags.`mlflow.runName`",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    return f"experiments/{experiments[0]}/runs?{urlencode(query)}"


def _all_runs(client: MlflowClient) -> list[Run]:
    """Returns all runs, the newest first."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    page = client.search_runs(experiments, order_by=[_NEWEST_FIRST])
    runs = list(page)
    while page.token:
        page = client.search_runs(experiments, order_by=[_NEWEST_FIRST], page_token=page.token)
        runs += page
    return runs


def _environment(client: MlflowClient, run: Run) -> dict[str, str]:
    """Returns the origin of the run: its tags, and its lock if it has one."""
    from mlflow.exceptions import MlflowException

    user_tags = _user_tags(run)
    tags = {
        name: value for name, value in run.data.tags.items() if not name.startswith(_OWN_TAGS) and name not in user_tags
    }
    locked: dict[str, str] = {}
    # A run that ended early has no lock in MLflow.
    with TemporaryDirectory() as folder, suppress(MlflowException, OSError):
        lock = client.download_artifacts(run.info.run_id, LOCK_NAME, folder)
        values = read(Path(lock), []).plain()
        for section in _LOCKED:
            locked |= {name: str(value) for name, value in flatten(values.get(section) or {}, section)}
        choices = (values.get("tuning") or {}).get("choices") or {}
        locked |= {name: str(value) for name, value in flatten(choices, "tuning")}
    return {"status": run.data.tags.get(STATUS, run.info.status), **tags, **locked}


def _differing(sides: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = _rows(sides, sorted({name for side in sides for name in side}))
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}


def _rows(sides: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Returns the values of each side under these names, if at least one side has a value."""
    rows = {name: [side.get(name) for side in sides] for name in names}
    return {name: row for name, row in rows.items() if row != [None] * len(sides)}
