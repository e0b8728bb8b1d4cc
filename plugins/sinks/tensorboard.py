"""Metrics as TensorBoard's event files."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

from runner.api import Sink, UsageError


class TensorBoardSink(Sink):
    """Writes event files into the folder ``tensorboard`` of a run."""

    kind = "tensorboard"

    @classmethod
    def require(cls) -> None:
        """Raises a UsageError if TensorBoard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise UsageError(
                "tracking.sinks: 'tensorboard' needs a package that is not installed: "
                "pip install 'proven-runner[tensorboard]'"
            )

    def __init__(self, folder: Path, run_name: str) -> None:
        # The import takes seconds, and only runs with this sink need it.
        from torch.utils.tensorboard import SummaryWriter

        target = folder / "tensorboard"
        # Event files cannot be continued at a line of the run's log.
        shutil.rmtree(target, ignore_errors=True)
        self._writer = SummaryWriter(str(target))

    def add_params(self, params: Mapping[str, str]) -> None:
        """Adds the values of the recipe as a table."""
        rows = [f"| {name} | {value} |" for name, value in sorted(params.items())]
        table = "\n".join(("| parameter | value |", "|---|---|", *rows))
        self._writer.add_text("recipe", table)

    def add_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Adds a point to the curve of each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, time)

    def flush(self) -> None:
        """Writes the points that are in memory."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
