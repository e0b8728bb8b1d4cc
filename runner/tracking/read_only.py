"""Databases of a workspace that can only be read."""

from pathlib import Path
from tempfile import mkdtemp

from runner.system.files import copy, is_writable

_BESIDE = ("-wal", "-journal")
"""Suffixes of files next to a SQLite database that have a part of its content."""


def copy_if_read_only(database: Path) -> Path | None:
    """Copies a SQLite database that this user cannot write; SQLite needs files
    next to it even for reading.

    Args:
        database: The file, which may not exist.

    Returns:
        A copy in a temporary folder, which the caller removes; None if the database can be written.
    """
    if is_writable(database) and is_writable(database.parent):
        return None
    folder = Path(mkdtemp(prefix="runner-read-"))
    companions = [database.with_name(database.name + suffix) for suffix in _BESIDE]
    for path in (database, *companions):
        if path.exists():
            copy(path, folder / path.name)
    return folder / database.name
