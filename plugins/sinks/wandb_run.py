"""Metrics as an offline run of Weights & Biases."""

import hashlib
import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.api import Sink, UsageError

FOLDER = "wandb"
"""Folder of a run with the offline run, which ``wandb sync`` uploads."""
PROGRESS = "progress"
"""The metric over which Weights & Biases draws all others."""


class WandbSink(Sink):
    """Writes an offline run into the folder ``wandb`` of a run; nothing is sent anywhere."""

    kind = "wandb"

    @classmethod
    def require(cls) -> None:
        """Raises a UsageError if the package is not installed."""
        if importlib.util.find_spec("wandb") is None:
            raise UsageError(
                "tracking.sinks: 'wandb' needs a package that is not installed: pip install 'proven-runner[wandb]'"
            )

    def __init__(self, folder: Path, run_name: str) -> None:
        # The import takes seconds, and only runs with this sink need it.
        import wandb

        # An offline run cannot be continued at a line of the run's log.
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        # The runner records output, code and machine itself, without secrets.
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        # The same run has the same id, so that an upload after a resumption replaces the earlier.
        self._run = wandb.init(
            dir=str(folder),
            id=hashlib.sha256(run_name.encode()).hexdigest()[:16],
            mode="offline",
            name=run_name,
            project="runner",
            reinit="create_new",
            settings=settings,
        )
        # Steps of Weights & Biases cannot go back, and progress is counted in the recipe's unit.
        self._run.define_metric(PROGRESS)
        self._run.define_metric("*", step_metric=PROGRESS)

    def add_params(self, params: Mapping[str, str]) -> None:
        """Adds the values of the recipe to the configuration of the run."""
        config: Any = self._run.config
        config.update(dict(params), allow_val_change=True)

    def add_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Adds a row to the history of the run."""
        self._run.log({**metrics, PROGRESS: step, "_timestamp": time})

    def close(self) -> None:
        """Ends the run; the process of Weights & Biases completes its file a moment later."""
        self._run.finish()
