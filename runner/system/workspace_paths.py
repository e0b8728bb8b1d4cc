"""Names of files in a workspace, without further imports."""

import os
from pathlib import Path
from urllib.parse import quote, unquote

VARIABLE = "RUNNER_WORKSPACE"
RECORD = "run.json"
"""In the folder of every run: what is known of it from outside."""
LOCK_NAME = "recipe.lock.yaml"
"""There, too: its recipe and what it was made from."""


def workspace_root(root: Path | str | None = None) -> Path:
    """The folder ``root``, or else ``$RUNNER_WORKSPACE``, or ``.runner`` in the current folder; absolute."""
    return Path(root or os.environ.get(VARIABLE) or ".runner").expanduser().resolve()


_SQLITE = "sqlite:///"
# MLflow makes the parent folder of a plain SQLite URI without unquoting it: a second, empty folder.
_QUOTED_SQLITE = "sqlite+pysqlite:///"
_UNQUOTED = " +/"  # as SQLAlchemy renders a path


def sqlite_uri(database: Path) -> str:
    """Returns the URI by which SQLAlchemy opens a SQLite file, whatever characters its path has."""
    path = quote(os.fsencode(database), safe=_UNQUOTED)
    return f"{_SQLITE if path == str(database) else _QUOTED_SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Returns the file of a SQLite URI; None for a URI of another database."""
    scheme, separator, path = uri.partition(":///")
    if separator and scheme in ("sqlite", "sqlite+pysqlite"):
        return Path(unquote(path.partition("?")[0], errors="surrogateescape"))
    return None


def is_server(uri: str) -> bool:
    """Returns whether a URI names a server instead of files."""
    return "://" in uri and sqlite_path(uri) is None and not uri.startswith(("file:", "sqlite"))
