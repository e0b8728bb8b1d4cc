"""MLflow as the runner uses it: opened once and safely, spoken to by explicit run ids, quiet."""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from filelock import FileLock

from runner.errors import StorageError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

    from runner.tracking.workspace import Workspace

VALUE_LENGTH = 6000
"""Characters of a param or tag that MLflow keeps; it cuts longer ones without a word."""
_METRICS, _PARAMS, _TAGS = 1000, 100, 100
"""What MLflow takes in one batch."""
_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "9p", "afs"})

Metric = tuple[str, float, int, int]
"""Key, value, timestamp in milliseconds, step."""


@dataclass(frozen=True)
class Store:
    """An MLflow tracking store that has answered."""

    client: MlflowClient
    uri: str
    artifacts: Path | None
    """Where new experiments keep their artifacts; None where a server decides."""

    @classmethod
    def open(cls, workspace: Workspace) -> Store:
        """Opens the store, creating the workspace's own database where ``MLFLOW_TRACKING_URI`` names no other.

        Processes that open a fresh database together wait for the first of them: MLflow's migrations do not bear
        company.

        Raises:
            StorageError: the store cannot be reached or written.
        """
        uri = workspace.tracking_uri
        _quieten()
        try:
            workspace.root.mkdir(parents=True, exist_ok=True)
            with _first_open(uri):
                _probe(uri)
                client = _connect(uri)
        except Exception as error:
            raise StorageError(_unavailable(uri, workspace, error)) from error
        return cls(client, uri, None if is_http(uri) else workspace.artifacts)

    def experiment(self, name: str) -> str:
        """The id of the experiment of that name, which is created if need be.

        Raises:
            StorageError: the name belongs to a deleted experiment, or the store cannot be written.
        """
        from mlflow.exceptions import MlflowException

        try:
            found = self.client.get_experiment_by_name(name) or self._create(name)
        except MlflowException as error:
            raise StorageError(f"cannot create experiment '{name}' in {shown(self.uri)}: {error}") from error
        if found.lifecycle_stage != "active":
            raise StorageError(
                f"experiment '{name}' is deleted in {shown(self.uri)}; choose another tracking.experiment or restore it: "
                f"mlflow experiments restore --experiment-id {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _create(self, name: str) -> Experiment:
        from mlflow.exceptions import MlflowException

        location = (self.artifacts / slug(name)).as_uri() if self.artifacts else None
        try:
            # The tag opens MLflow's page for training runs; without it the page asks what kind of experiment this is.
            created = self.client.create_experiment(
                name, location, tags={"mlflow.experimentKind": "custom_model_development"}
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another runner was faster
                raise
            return self.client.get_experiment_by_name(name)
        return self.client.get_experiment(created)

    def create_run(self, experiment_id: str, name: str) -> Run:
        """Starts a run named ``<name>-<first 8 digits of its id>``, as its folder is.

        Raises:
            StorageError: the store cannot be written.
        """
        from mlflow.exceptions import MlflowException

        try:
            run = self.client.create_run(experiment_id, run_name=name)
            self.client.update_run(run.info.run_id, name=f"{name}-{run.info.run_id[:8]}")
            return self.client.get_run(run.info.run_id)
        except MlflowException as error:
            raise StorageError(f"cannot start a run in {shown(self.uri)}: {error}") from error

    def send(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Writes values in batches that MLflow accepts; writing the same ones again changes nothing.

        Raises:
            MlflowException: the store cannot be reached, or refuses a value.
        """
        from mlflow.entities import Metric, Param, RunTag

        for some in _slices([Param(key, value) for key, value in (params or {}).items()], _PARAMS):
            self.client.log_batch(run_id, params=some)
        for some in _slices([RunTag(key, value) for key, value in (tags or {}).items()], _TAGS):
            self.client.log_batch(run_id, tags=some)
        for some in _slices([Metric(*metric) for metric in metrics], _METRICS):
            self.client.log_batch(run_id, metrics=some)


def is_http(uri: str) -> bool:
    """Whether the store is a server that is spoken to over HTTP."""
    return urlsplit(uri).scheme in {"http", "https"}


def shown(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def slug(name: str) -> str:
    """The name as one that a folder can have on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "unnamed"


def on_network_disk(path: Path) -> bool:
    """Whether the file system is shared between machines, where SQLite's write-ahead log must not be used."""
    import psutil

    disks = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    nearest = next((str(folder) for folder in [path, *path.parents] if str(folder) in disks), "")
    return disks.get(nearest, "") in _NETWORK_DISKS


def _quieten() -> None:
    """Silences MLflow's talk, its calls home and its long waits; what the user has set stays as it is."""
    for name, value in {
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.ERROR)


def _first_open(uri: str) -> AbstractContextManager[Any]:
    """A lock beside an SQLite database; other stores look after themselves."""
    database = _sqlite_file(uri)
    if database is None:
        return nullcontext()
    database.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{database}.lock", timeout=120)


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _probe(uri: str) -> None:
    """Fails at once where MLflow would try again for minutes."""
    database = _sqlite_file(uri)
    if database is not None:
        connection = sqlite3.connect(database, timeout=20)
        try:
            if not on_network_disk(database):
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        finally:
            connection.close()
    elif is_http(uri):
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    elif "://" in uri and not uri.startswith("file:"):
        from sqlalchemy import create_engine

        engine = create_engine(uri)
        engine.connect().close()
        engine.dispose()


def _connect(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    client.search_experiments(max_results=1)
    return client


def _unavailable(uri: str, workspace: Workspace, error: Exception) -> str:
    where = f"MLFLOW_TRACKING_URI={shown(uri)}" if "MLFLOW_TRACKING_URI" in os.environ else f"{workspace.root}"
    remedy = (
        "start the server, or unset MLFLOW_TRACKING_URI to use the local workspace"
        if "MLFLOW_TRACKING_URI" in os.environ
        else "choose a writable folder with RUNNER_WORKSPACE"
    )
    reason = str(error).replace(uri, shown(uri)).splitlines()[0]
    return f"tracking store {where} cannot be used: {reason}; {remedy}"


def _slices(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
