"""Checks before MLflow opens a tracking store, which it would retry for minutes or do in silence."""

from __future__ import annotations

import getpass
import os
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from runner.system.files import is_link

_NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "9p", "afs"})


def is_http(uri: str) -> bool:
    """Returns whether the store is an HTTP server."""
    return urlsplit(uri).scheme in {"http", "https"}


def on_network_disk(path: Path) -> bool:
    """Returns whether the file system is shared between machines, where SQLite's write-ahead log
    must not be used.
    """
    file_systems = {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)}
    for folder in (path, *path.parents):
        if str(folder) in file_systems:
            return file_systems[str(folder)] in _NETWORK_DISKS
    return False


def refuse_undecodable(database: Path) -> None:
    """Raises an OSError if SQLite cannot name the file: it takes UTF-8 only."""
    try:
        str(database).encode()
    except UnicodeEncodeError:
        printable_path = os.fsencode(database).decode(errors="backslashreplace")
        raise OSError(f"SQLite cannot open a path that is not UTF-8: {printable_path}") from None


def refuse_links(database: Path, artifacts: Path) -> None:
    """Raises an OSError if the database, a file next to it or the folder of
    artifacts is a link in a workspace.
    """
    if database.parent != artifacts.parent:
        return
    suffixes = ("-wal", "-shm", "-journal")
    companions = [database.with_name(f"{database.name}{suffix}") for suffix in suffixes]
    for path in (database, *companions, artifacts):
        if is_link(path):
            raise OSError(f"{path} is a symbolic link, which is not followed")


def probe(uri: str, database: Path | None) -> None:
    """Raises an error immediately where MLflow would retry for minutes."""
    if database is not None:
        with closing(sqlite3.connect(database, timeout=20)) as connection:
            if not on_network_disk(database):
                # Readers and the writer then do not wait for each other.
                connection.execute("PRAGMA journal_mode=WAL")
            # This fails if the file cannot be written.
            connection.execute("BEGIN IMMEDIATE")
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


def origin_tags() -> dict[str, str]:
    """Returns tags from which MLflow's page fills its columns User and Source."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        user = str(psutil.Process().uids().real)
    return {
        "mlflow.user": user,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": Path(sys.argv[0]).name,
    }
