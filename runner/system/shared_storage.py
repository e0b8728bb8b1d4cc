"""Storage and variables that tasks on several machines share."""

from __future__ import annotations

import os

from runner.system.errors import UsageError
from runner.system.workspace_paths import is_server

VARIABLES = ("RUNNER_DATA", "MLFLOW_TRACKING_URI", "OPTUNA_STORAGE")
"""Variables of this process, besides the workspace, that tasks need."""
SQLITE_PROBLEM = "SQLite is not reliable on a network disk"


def require_server(workers: int) -> None:
    """Raises a UsageError if workers of several machines would share a file of SQLite."""
    variable = "OPTUNA_STORAGE"
    if not is_server(os.environ.get(variable, "")):
        raise UsageError(
            f"{variable} names no server, and {workers} workers share one storage; {SQLITE_PROBLEM}: set it, "
            "for example to postgresql://user@host/studies"
        )
