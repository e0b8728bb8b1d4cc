"""MLflow as the runner uses it: quick to fail, quiet, safe when several come first, and nothing cut in silence."""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import socket
import sqlite3
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import psutil
from filelock import FileLock

from runner.system.errors import StorageError, UsageError
from runner.system.escapes import escape_undecodable
from runner.system.files import is_link, make_folder, remove_quietly
from runner.system.places import sqlite_path, sqlite_uri
from runner.system.secrets import REFUSED_NAME, has_secret, redact
from runner.tracking.description import DESCRIPTION, code, describe
from runner.tracking.keys import setting_keys
from runner.tracking.read_only import copy_if_read_only
from runner.tracking.relocation import relocate
from runner.tracking.view import TAG
from runner.tracking.workspace import Workspace, folder_name

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

HOST, PORT = "127.0.0.1", 5000
"""Where MLflow's page is shown, unless the port is taken or a server has the page already."""
HEADLINE = "recipe.headline"
"""The tag with the metrics that a person looks at first, the objective before all others, with commas between."""
OBJECTIVE = "recipe.objective"
"""The tag with direction and name of the objective: ``maximize eval/return``."""
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
_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "9p", "afs"})
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
    spelled = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    spelled = escape_undecodable(redact(spelled))
    if len(spelled) <= _TEXT_LENGTH:
        return spelled
    mark = f" ... [shortened from {len(spelled)} characters]"
    return spelled[: _TEXT_LENGTH - len(mark)] + mark


def is_http(uri: str) -> bool:
    """Returns whether the store is an HTTP server."""
    return urlsplit(uri).scheme in {"http", "https"}


def shown(uri: str) -> str:
    """The URI without user name and password."""
    with suppress(ValueError):  # a host that is none
        parts = urlsplit(uri)
        if "@" in parts.netloc:  # any other URI stays as it is spelled
            uri = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return redact(uri)


def on_network_disk(path: Path) -> bool:
    """Returns whether the file system is shared between machines, where SQLite's write-ahead log
    must not be used.
    """
    disks = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    return next((disks[str(each)] for each in [path, *path.parents] if str(each) in disks), "") in _NETWORK_DISKS


def _refuse_undecodable(database: Path) -> None:
    """Raises an OSError if SQLite cannot name the file: it takes UTF-8 only."""
    try:
        str(database).encode()
    except UnicodeEncodeError:
        shown_path = os.fsencode(database).decode(errors="backslashreplace")
        raise OSError(f"SQLite cannot open a path that is not UTF-8: {shown_path}") from None


def _refuse_links(database: Path, artifacts: Path) -> None:
    """Raises an OSError if the database, a file next to it or the folder of
    artifacts is a link in a workspace.
    """
    if database.parent != artifacts.parent:
        return
    beside = [database.with_name(f"{database.name}{suffix}") for suffix in ("-wal", "-shm", "-journal")]
    for path in (database, *beside, artifacts):
        if is_link(path):
            raise OSError(f"{path} is a symbolic link, which is not followed")


def _probe(uri: str, database: Path | None) -> None:
    """Raises an error immediately where MLflow would retry for minutes."""
    if database is not None:
        with closing(sqlite3.connect(database, timeout=20)) as connection:
            if not on_network_disk(database):
                connection.execute("PRAGMA journal_mode=WAL")  # readers and the writer no longer wait for each other
            connection.execute("BEGIN IMMEDIATE")  # fails if the file cannot be written
            connection.rollback()
    elif is_http(uri):
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    elif uri.partition("+")[0].partition(":")[0] in {"postgresql", "mysql", "mssql"}:
        from sqlalchemy import create_engine

        engine = create_engine(uri)
        engine.connect().close()
        engine.dispose()


def _origin() -> dict[str, str]:
    """Returns tags from which MLflow's page fills its columns User and Source."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(psutil.Process().uids().real)
    return {"mlflow.user": user, "mlflow.source.type": "LOCAL", "mlflow.source.name": Path(sys.argv[0]).name}


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
        self.uri = uri = workspace.tracking_uri
        self._artifacts = workspace.artifacts
        database = sqlite_path(uri)
        is_own = uri == sqlite_uri(workspace.database)
        if reading and is_own and not workspace.database.exists():
            raise EmptyError(f"no runs in {workspace.root}; start one: runner run marl_phase2")
        try:
            if database:
                _refuse_undecodable(database)
                _refuse_links(database, self._artifacts)
                copied = copy_if_read_only(database) if reading else None
                if copied is not None:
                    weakref.finalize(self, remove_quietly, copied.parent)
                    database = copied
                    self.uri = uri = sqlite_uri(database)
                make_folder(database.parent)
            with FileLock(f"{database}.lock", timeout=120) if database else nullcontext():
                _probe(uri, database)
                for name, value in QUIET.items():
                    # Values that the user has set have precedence.
                    os.environ.setdefault(name, value)
                logging.getLogger("alembic").setLevel(logging.ERROR)
                from mlflow import MlflowClient

                if is_own:
                    assert database is not None
                    relocate(workspace, database)
                self.client = MlflowClient(uri)
                self.client.search_experiments(max_results=1)
        except Exception as error:  # drivers and MLflow raise whatever they like
            reason = redact(str(error).replace(uri, shown(uri))).partition("\n")[0]
            remedy = "name a writable folder in RUNNER_WORKSPACE"
            if "MLFLOW_TRACKING_URI" in os.environ:
                remedy = "start it, or unset MLFLOW_TRACKING_URI to use the local workspace"
            raise StorageError(f"tracking store {shown(uri)} cannot be used: {reason}; {remedy}") from error

    def experiment(self, name: str, view: str = "") -> str:
        """The id of the experiment of that name, which is created if need be; one that was deleted is refused.

        Given a ``view``, the experiment keeps it for MLflow's page.
        """
        for what, text in (
            ("tracking.experiment", name),
            ("the path of the workspace (RUNNER_WORKSPACE)", str(self._artifacts)),
        ):
            if has_secret(text):
                raise UsageError(f"{what} {REFUSED_NAME}")
        location = None if is_http(self.uri) else (self._artifacts / folder_name(name)).as_uri()
        # The tag opens MLflow's page for training runs; without it the page
        # requests the type of the experiment.
        tags = {"mlflow.experimentKind": "custom_model_development"}
        with self.telling(f"create experiment '{name}'"):
            found = self.client.get_experiment_by_name(name)
            try:
                found = found or self.client.get_experiment(self.client.create_experiment(name, location, tags))
            except Exception:  # another runner may have created it
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise StorageError(
                f"experiment '{name}' is deleted in {shown(self.uri)}; choose another tracking.experiment, or restore "
                f"it: mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        if view and found.tags.get(TAG) != view:
            with self.telling(f"write to experiment '{name}'"):
                self.client.set_experiment_tag(found.experiment_id, TAG, view)
        return str(found.experiment_id)

    def create_run(self, experiment_id: str, name: str, started: int | None = None) -> str:
        """Starts a run of that name, at a time in milliseconds or now, and returns its id."""
        with self.telling("start a run"):
            return str(self.client.create_run(experiment_id, started, _origin(), name).info.run_id)

    def run_named(self, experiment_id: str, name: str) -> str | None:
        """The id of the run of that name; None if there is none."""
        with self.telling("look for a run"):
            found = self.client.search_runs([experiment_id], f"attributes.run_name = '{name}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def rename_run(self, run_id: str, name: str) -> None:
        """Gives a run another name."""
        with self.telling("name a run"):
            self.client.update_run(run_id, name=name)

    def delete_run(self, experiment: str, run_id: str | None, name: str) -> list[str]:
        """Deletes a run, by its id or else its name, with all that are below it; returns their ids, none without it."""
        with self.telling(f"delete run {name}"):
            found = self.client.get_experiment_by_name(experiment)
            if found is None:
                return []
            wanted = f"attributes.run_id = '{run_id}'" if run_id else f"attributes.run_name = '{name}'"
            own = [str(run.info.run_id) for run in self.client.search_runs([found.experiment_id], wanted)]
            for parent in own:  # which grows by what is below
                below = self.client.search_runs([found.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
                own += [str(run.info.run_id) for run in below]
            for each in own:
                self.client.delete_run(each)
        return own

    def set_status(self, run_id: str, status: str, time_ms: int) -> None:
        """Sets how a run ended, or that it is running again."""
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, time_ms)

    def send(self, run_id: str, metrics: Sequence[Metric], params: Mapping[str, str], tags: Mapping[str, str]) -> None:
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
        given = Dataset(name, digest, "code", source, profile=profile)
        self.client.log_inputs(run_id, [DatasetInput(given, [InputTag("mlflow.data.context", "train")])])

    def log_model(self, run_id: str, folder: Path, step: int) -> None:
        """Logs a folder as the model of a run, with the run's settings and results at a step.

        A process that died in the middle of it left what is used now.
        """
        from mlflow.entities import LoggedModelOutput, Metric

        run = self.client.get_run(run_id)
        experiment_id = run.info.experiment_id
        begun = self.client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        name = re.sub(r"[/:.%\"']", "_", run.info.run_name)  # as MLflow has them
        params = run.data.params
        model = begun[0] if begun else self.client.create_logged_model(experiment_id, name, run_id, params=params)
        facts = {
            "what it is": f"the model of {code(run.info.run_name)} at step {step:,}",
            "load it": code(f'runner.load_model("{model.model_uri}")'),
        }
        self.client.set_logged_model_tags(model.model_id, {DESCRIPTION: describe(facts)})
        judged = [self.client.get_metric_history(run_id, name) for name in run.data.metrics if name[:5] == "eval/"]
        points = [point for history in judged for point in history if point.step == step and isfinite(point.value)]
        own = [Metric(each.key, each.value, each.timestamp, step, model_id=model.model_id) for each in points]
        self.client.log_batch(run_id, own)
        self.client.log_model_artifacts(model.model_id, str(folder))
        self.client.finalize_logged_model(model.model_id, "READY")
        if run.outputs is None or not run.outputs.model_outputs:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])

    def logged_model(self, run_id: str, folder: Path, step: int) -> LoggedModel:
        """Returns the logged model of a run; logs the folder if there is none yet."""
        with self.telling("log a model"):
            wanted = [self.client.get_run(run_id).info.experiment_id], f"source_run_id = '{run_id}'"
            found = self.client.search_logged_models(*wanted, max_results=1)
            if not found or found[0].status != "READY":
                self.log_model(run_id, folder, step)
                found = self.client.search_logged_models(*wanted, max_results=1)
            return found[0]

    def model(self, uri: str) -> Path:
        """The folder of a logged model (``models:/m-...``), fetched if need be; a ``StorageError`` if it is not had."""
        from mlflow.artifacts import download_artifacts

        with self.telling(f"open {uri}"):
            place = self.client.get_logged_model(uri.removeprefix("models:/")).artifact_location
            return Path(download_artifacts(place, tracking_uri=self.uri))

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
