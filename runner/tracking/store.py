"""MLflow as the runner uses it: quick to fail, quiet, safe when several come first, and nothing cut in silence."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from filelock import FileLock

from runner.system.errors import StorageError, UsageError
from runner.system.escapes import escape_undecodable
from runner.system.files import make_folder, remove_quietly
from runner.system.secrets import REFUSED_NAME, has_secret, redact
from runner.system.workspace_paths import sqlite_path, sqlite_uri
from runner.tracking.access import is_http, origin_tags, probe, refuse_links, refuse_undecodable
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.keys import setting_keys
from runner.tracking.mlflow_view import TAG
from runner.tracking.read_only import copy_if_read_only
from runner.tracking.relocation import relocate
from runner.tracking.workspace import Workspace, folder_name

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run
    from mlflow.entities import Metric as MlflowMetric

HOST = "127.0.0.1"
PORT = 5000
"""Where MLflow's page is shown, unless the port is taken or a server has the page already."""
HEADLINE = "recipe.headline"
"""The tag with the metrics that a person looks at first, the objective before all others, with commas between."""
OBJECTIVE = "recipe.objective"
"""The tag with direction and name of the objective: ``maximize eval/return``."""
STATUS = "recipe.status"
"""The tag with the runner's status, because MLflow has no word for a run that was stopped."""
USER_TAGS = "recipe.tags"
"""The tag with the names of the tags that the user gave, joined by commas."""
VIEW = "workflowType=machine_learning"
"""Opens MLflow's pages for training rather than for language models."""
Metric = tuple[str, float, int, int]
"""Key, value, timestamp in milliseconds, step."""
QUIET = {
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Variables that silence MLflow's talk, its calls home and its waits of minutes."""

_TEXT_LENGTH = 6000
_log = logging.getLogger(__name__)


def params_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as MLflow params, or tags: ``{"model": {"hidden": [64, 64]}}`` becomes ``{"model.hidden": "[64, 64]"}``.

    Values are spelled as in JSON, strings without quotes.
    """
    return {key: text(value) for key, value in setting_keys(settings)}


def user_tags(tags: Mapping[str, object]) -> dict[str, str]:
    """Tags of a user as MLflow's; a ``UsageError`` if a name contains a secret."""
    for name in tags:
        if has_secret(name):
            raise UsageError(f"tag '{redact(name)}' {REFUSED_NAME}")
    return params_of(tags)


def text(value: object) -> str:
    """A param's or tag's value, shortened with a mark where MLflow would cut it without a word."""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    spelled = escape_undecodable(redact(value))
    if len(spelled) <= _TEXT_LENGTH:
        return spelled
    mark = f" ... [shortened from {len(spelled)} characters]"
    return spelled[: _TEXT_LENGTH - len(mark)] + mark


def shown(uri: str) -> str:
    """The URI without user name and password."""
    # The host may not be valid.
    with suppress(ValueError):
        parts = urlsplit(uri)
        # A URI without a user stays as it is spelled.
        if "@" in parts.netloc:
            host = parts.netloc.rpartition("@")[2]
            uri = urlunsplit(parts._replace(netloc=host))
    return redact(uri)


class EmptyError(UsageError):
    """A workspace has no database yet, so there is nothing to read."""


class Store:
    """An MLflow tracking store that has answered.

    Methods for experiments and runs raise ``StorageError`` if MLflow refuses; methods that write to
    a run raise MLflow's errors, so that callers can retry.
    """

    def __init__(self, workspace: Workspace, reading: bool = False) -> None:
        """Opens the store, and creates the workspace's database unless
        ``MLFLOW_TRACKING_URI`` names another one.

        Processes that open a fresh SQLite database together wait for the first of them, because MLflow's migrations
        break the file when two run at once. A ``StorageError`` within seconds if it cannot be reached or written.
        With ``reading``, a database that cannot be written is opened as a copy, and none is created: an ``EmptyError``
        if the workspace has none.
        """
        self.uri = workspace.tracking_uri
        self._artifacts = workspace.artifacts
        database = sqlite_path(self.uri)
        is_own = self.uri == sqlite_uri(workspace.database)
        if reading and is_own and not workspace.database.exists():
            raise EmptyError(f"no runs in {workspace.root}; start one: runner run marl_phase2")
        try:
            if database:
                database = self._prepare_database(database, reading)
            with FileLock(f"{database}.lock", timeout=120) if database else nullcontext():
                probe(self.uri, database)
                for name, value in QUIET.items():
                    # Values that the user has set have precedence.
                    os.environ.setdefault(name, value)
                logging.getLogger("alembic").setLevel(logging.ERROR)
                # MLflow uses it, and a user's PYTHONWARNINGS=error would end every training.
                warnings.filterwarnings("ignore", "The ``noload`` loader strategy", DeprecationWarning)
                from mlflow import MlflowClient

                if is_own:
                    assert database is not None
                    relocate(workspace, database)
                self.client = MlflowClient(self.uri)
                self.client.search_experiments(max_results=1)
        except Exception as error:  # drivers and MLflow raise whatever they like
            printable_uri = shown(self.uri)
            reason = redact(str(error).replace(self.uri, printable_uri)).partition("\n")[0]
            hint = "name a writable folder in RUNNER_WORKSPACE"
            if "MLFLOW_TRACKING_URI" in os.environ:
                hint = "start it, or unset MLFLOW_TRACKING_URI to use the local workspace"
            raise StorageError(f"tracking store {printable_uri} cannot be used: {reason}; {hint}") from error

    def _prepare_database(self, database: Path, reading: bool) -> Path:
        """Returns the database to open: for reading one that cannot be written, a copy that this store removes."""
        refuse_undecodable(database)
        refuse_links(database, self._artifacts)
        copied = copy_if_read_only(database) if reading else None
        if copied is not None:
            weakref.finalize(self, remove_quietly, copied.parent)
            database = copied
            self.uri = sqlite_uri(database)
        make_folder(database.parent)
        return database

    def experiment(self, name: str, view: str = "") -> str:
        """The id of the experiment of that name, which is created if need be; one that was deleted is refused.

        Given a ``view``, the experiment keeps it for MLflow's page.
        """
        names = {
            "tracking.experiment": name,
            "the path of the workspace (RUNNER_WORKSPACE)": str(self._artifacts),
        }
        for label, used_name in names.items():
            if has_secret(used_name):
                raise UsageError(f"{label} {REFUSED_NAME}")
        location = None
        if not is_http(self.uri):
            location = (self._artifacts / folder_name(name)).as_uri()
        # The tag opens MLflow's page for training runs; without it the page
        # requests the type of the experiment.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        with self.telling(f"create experiment '{name}'"):
            experiment = self.client.get_experiment_by_name(name)
            try:
                if experiment is None:
                    experiment_id = self.client.create_experiment(name, location, tags)
                    experiment = self.client.get_experiment(experiment_id)
            except Exception:
                # Another runner may have created it.
                experiment = self.client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        if experiment.lifecycle_stage != "active":
            raise StorageError(
                f"experiment '{name}' is deleted in {shown(self.uri)}; choose another tracking.experiment, or restore "
                f"it: mlflow experiments restore --experiment-id {experiment.experiment_id}"
            )
        if view and experiment.tags.get(TAG) != view:
            with self.telling(f"write to experiment '{name}'"):
                self.client.set_experiment_tag(experiment.experiment_id, TAG, view)
        return str(experiment.experiment_id)

    def create_run(self, experiment_id: str, name: str, started: int | None = None) -> str:
        """Starts a run of that name, at a time in milliseconds or now, and returns its id."""
        with self.telling("start a run"):
            run = self.client.create_run(experiment_id, started, origin_tags(), name)
            return str(run.info.run_id)

    def run_named(self, experiment_id: str, name: str) -> str | None:
        """The id of the run of that name; None if there is none."""
        with self.telling("look for a run"):
            condition = f"attributes.run_name = '{name}'"
            runs = self.client.search_runs([experiment_id], condition, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def has_run(self, run_id: str) -> bool:
        """Returns whether a run exists."""
        from mlflow.exceptions import MlflowException

        with self.telling("look for a run"):
            try:
                self.client.get_run(run_id)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return False
                raise
        return True

    def rename_run(self, run_id: str, name: str) -> None:
        """Gives a run another name."""
        with self.telling("name a run"):
            self.client.update_run(run_id, name=name)

    def delete_run(self, experiment: str, run_id: str | None, name: str) -> list[str]:
        """Deletes a run, by its id or else its name, with all that are below it; returns their ids, none without it."""
        with self.telling(f"delete run {name}"):
            found_experiment = self.client.get_experiment_by_name(experiment)
            if found_experiment is None:
                return []
            experiment_id = found_experiment.experiment_id
            condition = f"attributes.run_name = '{name}'"
            if run_id:
                condition = f"attributes.run_id = '{run_id}'"
            run_ids = self._run_ids(experiment_id, condition)
            # The list grows by the runs below each run.
            for parent in run_ids:
                run_ids += self._run_ids(experiment_id, f"tags.`mlflow.parentRunId` = '{parent}'")
            for deleted_id in run_ids:
                self.client.delete_run(deleted_id)
        return run_ids

    def _run_ids(self, experiment_id: str, condition: str) -> list[str]:
        runs = self.client.search_runs([experiment_id], condition)
        return [str(run.info.run_id) for run in runs]

    def set_status(self, run_id: str, status: str, time_ms: int) -> None:
        """Sets how a run ended, or that it is running again.

        A run that was STOPPED or PREEMPTED is KILLED in MLflow, and ``STATUS`` keeps the difference.
        """
        self.client.set_tag(run_id, STATUS, status)
        if status in ("STOPPED", "PREEMPTED"):
            status = "KILLED"
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, time_ms)

    def send(
        self,
        run_id: str,
        metrics: Sequence[Metric],
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> None:
        """Writes values to a run; writing the same ones again changes nothing.

        A value that the store refuses for good (a param that had another value) is reported and passed over.
        """
        from mlflow.entities import Metric, Param, RunTag

        self._send(run_id, "params", [Param(key, value) for key, value in params.items()], 100)
        self._send(run_id, "tags", [RunTag(key, value) for key, value in tags.items()], 100)
        self._send(run_id, "metrics", [Metric(*metric) for metric in metrics], 1000)

    def log_artifact(self, run_id: str, path: Path) -> None:
        """Copies a file, or what is in a folder, to a run's artifacts."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(run_id, str(path))

    def log_dataset(self, run_id: str, name: str, digest: str, profile: str) -> None:
        """Writes the dataset of a run; a repetition changes nothing."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = json.dumps({"tags": {"mlflow.source.type": "LOCAL", "mlflow.source.name": name}})
        dataset = Dataset(name, digest, "code", source, profile=profile)
        context = InputTag("mlflow.data.context", "train")
        self.client.log_inputs(run_id, [DatasetInput(dataset, [context])])

    def log_model(self, run_id: str, folder: Path, step: int) -> None:
        """Logs a folder as the model of a run, with the run's settings and results at a step.

        A process that died in the middle of it left what is used now.
        """
        from mlflow.entities import LoggedModelOutput, Metric

        run = self.client.get_run(run_id)
        model = self._started_model(run)
        facts = {
            "what it is": f"the model of {code(run.info.run_name)} at step {step:,}",
            "load it": code(f'runner.load_model("{model.model_uri}")'),
        }
        self.client.set_logged_model_tags(model.model_id, {DESCRIPTION: describe(facts)})

        # The other values of the step, which are not finite, are in the run alone.
        points = [point for point in self._evaluations(run) if point.step == step and isfinite(point.value)]
        results = [Metric(point.key, point.value, point.timestamp, step, model_id=model.model_id) for point in points]
        self.client.log_batch(run_id, results)
        self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        if run.outputs is None or not run.outputs.model_outputs:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])

    def _started_model(self, run: Run) -> LoggedModel:
        """Returns the model of a run that a process has started to log, or a new one."""
        run_id = run.info.run_id
        experiment_id = run.info.experiment_id
        models = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        if models:
            return models[0]
        # MLflow refuses these characters in the name of a model.
        name = re.sub(r"[/:.%\"']", "_", run.info.run_name)
        return self.client.create_logged_model(experiment_id, name, run_id, params=run.data.params)

    def _evaluations(self, run: Run) -> Iterator[MlflowMetric]:
        """The values of all evaluation metrics of a run, as MLflow has them."""
        for name in run.data.metrics:
            if name.startswith("eval/"):
                yield from self.client.get_metric_history(run.info.run_id, name)

    def logged_model(self, run_id: str, folder: Path, step: int) -> LoggedModel:
        """Returns the logged model of a run; logs the folder if there is none yet."""
        with self.telling("log a model"):
            experiment_ids = [self.client.get_run(run_id).info.experiment_id]
            condition = f"source_run_id = '{run_id}'"
            models = self.client.search_logged_models(experiment_ids, condition, max_results=1)
            if not models or models[0].status != "READY":
                self.log_model(run_id, folder, step)
                models = self.client.search_logged_models(experiment_ids, condition, max_results=1)
            return models[0]

    def model(self, uri: str) -> Path:
        """The folder of a logged model (``models:/m-...``), fetched if need be; a ``StorageError`` if it is not had."""
        from mlflow.artifacts import download_artifacts

        with self.telling(f"open {uri}"):
            model = self.client.get_logged_model(uri.removeprefix("models:/"))
            return Path(download_artifacts(model.artifact_location, tracking_uri=self.uri))

    def _send(self, run_id: str, kind: str, items: list[Any], size: int) -> None:
        """Sends items in batches of a size that MLflow accepts; items of a refused batch are sent
        one by one, to find the refused one.
        """
        from mlflow.exceptions import MlflowException

        for start in range(0, len(items), size):
            batch = items[start : start + size]
            try:
                self.client.log_batch(run_id, **{kind: batch})  # type: ignore[arg-type]
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                if len(batch) > 1:
                    self._send(run_id, kind, batch, 1)
                else:
                    _log.warning("MLflow refused %s '%s': %s", kind[:-1], batch[0].key, error)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Raises a ``StorageError`` with the failed action if MLflow or one of its drivers
        fails.
        """
        try:
            yield
        except Exception as error:
            raise StorageError(f"cannot {what} in {shown(self.uri)}: {error}") from error
