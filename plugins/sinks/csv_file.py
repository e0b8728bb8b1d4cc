"""Metrics as a file of comma-separated values."""

import csv
from collections.abc import Mapping
from pathlib import Path

from runner.api import Sink

COLUMNS = ("step", "time", "metric", "value")


class CsvSink(Sink):
    """Writes ``metrics.csv`` in the folder of a run: one row for each value."""

    kind = "csv"

    def __init__(self, folder: Path, run_name: str) -> None:
        # Each value has a row, because metrics are logged at different steps.
        self._file = (folder / "metrics.csv").open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def add_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Writes a row for each metric."""
        for name, value in metrics.items():
            self._writer.writerow((step, f"{time:.3f}", name, value))

    def flush(self) -> None:
        """Writes the rows that the file's buffer holds."""
        # Other programs read the file while the run lasts.
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
