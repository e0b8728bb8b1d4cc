"""The way to an MLflow store: quick to fail, safe when several processes come first, quiet."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from filelock import FileLock

from runner.system.errors import StorageError
from runner.system.secrets import redact

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "9p", "afs"})


def connect(uri: str) -> MlflowClient:
    """A client whose store has answered.

    Processes that open a fresh SQLite database together wait for the first of them, because MLflow's migrations
    break the file when two run at once.

    Raises:
        StorageError: the store cannot be reached or written; said within seconds.
    """
    try:
        with _first_open(uri):
            _probe(uri)
            client = _client(uri)
            client.search_experiments(max_results=1)
    except Exception as error:  # drivers and MLflow raise whatever they like
        reason = redact(str(error).replace(uri, shown(uri))).partition("\n")[0]
        raise StorageError(f"tracking store {shown(uri)} cannot be used: {reason}; {_remedy()}") from error
    return client


def is_http(uri: str) -> bool:
    """Whether the store is a server that is spoken to over HTTP."""
    return urlsplit(uri).scheme in {"http", "https"}


def shown(uri: str) -> str:
    """The URI without user name and password."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # a host that is none
        return redact(uri)
    return redact(urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri)


def on_network_disk(path: Path) -> bool:
    """Whether the file system is shared between machines, where SQLite's write-ahead log must not be used."""
    import psutil

    disks = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    nearest = next((str(folder) for folder in [path, *path.parents] if str(folder) in disks), "")
    return disks.get(nearest, "") in _NETWORK_DISKS


def quiet_environment() -> dict[str, str]:
    """Variables that silence MLflow's talk, its calls home and its waits of minutes."""
    return {
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    }


def _client(uri: str) -> MlflowClient:
    for name, value in quiet_environment().items():
        os.environ.setdefault(name, value)  # what the user has set stays as it is
    logging.getLogger("alembic").setLevel(logging.ERROR)
    from mlflow import MlflowClient

    return MlflowClient(uri)


def _first_open(uri: str) -> AbstractContextManager[Any]:
    database = _sqlite_file(uri)
    if database is None:
        return nullcontext()
    database.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{database}.lock", timeout=120)


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _probe(uri: str) -> None:
    """Raises at once where MLflow would try again for minutes."""
    database = _sqlite_file(uri)
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


def _remedy() -> str:
    if "MLFLOW_TRACKING_URI" in os.environ:
        return "start it, or unset MLFLOW_TRACKING_URI to use the local workspace"
    return "name a writable folder in RUNNER_WORKSPACE"
