"""Where a workspace lies and what its runs are known by, for who needs no more of it than names."""

import os
from pathlib import Path

VARIABLE = "RUNNER_WORKSPACE"
RECORD = "run.json"
"""In the folder of every run: what is known of it from outside."""
LOCK_NAME = "recipe.lock.yaml"
"""There, too: its recipe and what it was made from."""


def workspace_root(root: Path | str | None = None) -> Path:
    """The folder ``root``, or else ``$RUNNER_WORKSPACE``, or ``.runner`` in the current folder; absolute."""
    return Path(root or os.environ.get(VARIABLE) or ".runner").expanduser().resolve()
