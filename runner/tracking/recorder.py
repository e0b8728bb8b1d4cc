"""What one training logs, on its way into the spool."""

import errno
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.tracking.history import History
from runner.tracking.spool import Spool
from runner.tracking.values import key


class Recorder:
    """Writes metrics and other records to a spool; what a dead process has logged already is not written again.

    Attributes:
        spool: the file.
        step: the newest step of which something was logged.
    """

    def __init__(self, path: Path, history: History, step: int = 0, prefix: str = "") -> None:
        """Opens the spool.

        Args:
            path: of the spool.
            history: what a dead process logged after the checkpoint that the training goes on from.
            step: that of the checkpoint.
            prefix: stands before the name of every metric.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        self.spool = Spool(path)
        self.step = step
        self._history, self._prefix = history, prefix
        self._names: dict[str, str] = {}
        self._not_finite: set[str] = set()

    def append(self, *, urgent: bool = False, **record: Any) -> None:
        """Writes one record with the time of this call; see ``Spool.append``."""
        self.spool.append({"t": time.time_ns() // 1_000_000, **record}, urgent=urgent)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step.

        NaN and infinities are kept as they are in the spool and reach MLflow as NaN, which leaves a gap in the curve;
        a tag ``not_finite.<metric>`` names the first of each metric.

        Args:
            metrics: numbers by name; ``/`` groups them into sections of MLflow's page.
            step: environment steps or updates so far.
        """
        self.step = max(self.step, step)
        values: dict[str, float | str] = {}
        for given, number in metrics.items():
            name = self._names.get(given) or self._names.setdefault(given, key(self._prefix + given))
            value = float(number)
            if self._history and self._history.has(name, step, value):
                continue
            if math.isfinite(value):
                values[name] = value
            else:
                values[name] = str(value)
                self._report_not_finite(name, value, step)
        if values:
            self.append(step=step, metrics=values)

    def _report_not_finite(self, name: str, value: float, step: int) -> None:
        if name not in self._not_finite:
            self._not_finite.add(name)
            self.append(tags={key(f"not_finite.{name}"): f"{value} at step {step}"})

    def mark(self) -> int:
        """The place in the spool from which a training that resumes here has to read."""
        return self._history.cursor(self.step, self.spool.size)

    def sync(self) -> None:
        """Makes durable what was logged so far.

        Raises:
            OSError: the disk refuses it.
        """
        if not self.spool.sync():
            raise OSError(errno.ENOSPC, "the disk refuses the run's metrics")
