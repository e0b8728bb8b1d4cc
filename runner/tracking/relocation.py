"""Makes a moved workspace usable: MLflow's database contains absolute paths of artifacts."""

import logging
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from runner.system.files import write_durably
from runner.tracking.workspace import Workspace

_ROOT = "root"  # a file of the workspace: where it was when its database was last opened
_log = logging.getLogger(__name__)


def relocate(workspace: Workspace, database: Path) -> None:
    """Rewrites the places that a workspace's database, or a copy of it, records, if the workspace was moved or copied.

    The caller holds the lock of the database.

    Raises:
        sqlite3.Error: The database cannot be read or written.
    """
    former = _former_root(workspace)
    if former == workspace.root:
        return
    if former is not None and database.exists():
        # Places of artifacts are URIs, and some tags are paths.
        prefixes = {str(former): str(workspace.root), former.as_uri(): workspace.root.as_uri()}
        with closing(sqlite3.connect(database, timeout=20)) as connection, connection:
            for old_prefix, new_prefix in prefixes.items():
                _replace_prefix(connection, old_prefix, new_prefix)
        _log.warning(
            "the workspace was moved from %s to %s; its records in MLflow follow",
            former,
            workspace.root,
        )
    # A workspace that can only be read is not moved by this process.
    with suppress(OSError):
        write_durably(workspace.root / _ROOT, f"{workspace.root}\n")


def _former_root(workspace: Workspace) -> Path | None:
    """Returns where the workspace was when its database was last opened; None if that is not recorded."""
    with suppress(OSError, ValueError):
        text = (workspace.root / _ROOT).read_text().removesuffix("\n")
        return Path(text) if text.startswith("/") else None
    return None


def _replace_prefix(database: sqlite3.Connection, old_prefix: str, new_prefix: str) -> None:
    """Replaces a folder at the beginning of every text in a database."""
    length = len(old_prefix) + 1
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns = database.execute(f'PRAGMA table_info("{table}")').fetchall()
        for _, column, kind, *_ in columns:
            if kind.upper().startswith(("VARCHAR", "TEXT")):
                # Not LIKE, in which % and _ of a path would match any text.
                database.execute(
                    f'UPDATE "{table}" SET "{column}" = ? || substr("{column}", ?) '  # noqa: S608
                    f'WHERE "{column}" = ? OR substr("{column}", 1, ?) = ?',
                    (new_prefix, length, old_prefix, length, f"{old_prefix}/"),
                )
