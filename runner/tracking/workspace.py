"""Where runs live: the workspace folder and everything in it."""

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "RUNNER_WORKSPACE"


@dataclass(frozen=True)
class Workspace:
    """One folder that holds MLflow's database, its artifacts and a folder for every run."""

    root: Path

    @property
    def database(self) -> Path:
        """MLflow's SQLite file, used when ``MLFLOW_TRACKING_URI`` names no other store."""
        return self.root / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """Artifacts of all runs that a local store records."""
        return self.root / "artifacts"

    @property
    def runs(self) -> Path:
        """One folder a run: its lock, its spool, its checkpoints."""
        return self.root / "runs"

    @property
    def tracking_uri(self) -> str:
        """``MLFLOW_TRACKING_URI`` if it is set, otherwise the workspace's own database."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.database}"


def workspace(root: Path | str | None = None) -> Workspace:
    """The workspace at ``root``, else at ``$RUNNER_WORKSPACE``, else ``.runner`` in the current folder.

    Nothing is created. The path is made absolute, because MLflow records absolute artifact locations.
    """
    chosen = root or os.environ.get(VARIABLE) or ".runner"
    return Workspace(Path(chosen).expanduser().resolve())
