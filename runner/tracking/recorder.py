"""The log of a training: a file with everything that was logged, without a value twice."""

import errno
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from runner.tracking.keys import mlflow_key
from runner.tracking.spool import Spool, lines

_MEASURED = ("perf/", "system/")
"""Metrics that are not the same when something is done twice."""
_log = logging.getLogger(__name__)


class Recorder:
    """Writes what a training logs to a spool, so that an MLflow that is away costs neither metrics nor time.

    A metric that a dead process logged after the checkpoint from which the training resumes is not
    logged again: the first value stays. If the second one differs, the run did not continue bit for
    bit, which is reported once.
    """

    def __init__(
        self,
        path: Path,
        cursor: int | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> None:
        """Opens the spool of a new training, or of a resumed one with the result
        of ``mark`` at the checkpoint.
        """
        self.spool = Spool(path)
        self.step = step  # newest step with logged metrics
        self._cursor = cursor or 0
        self._prefix = prefix
        self._logged = {} if cursor is None else _values_since(path, cursor, step)
        self._warned_of_other_bits = False
        self._not_finite: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics of one step, with the time of this call; ``/`` in a name makes a section of MLflow's page.

        NaN and infinities are kept as they are in the spool and reach MLflow as NaN, which leaves a gap in the curve;
        a tag ``not_finite.<metric>`` names the first of each metric.
        """
        self.step = max(self.step, step)
        values: dict[str, float | str] = {}
        for metric, number in metrics.items():
            name = mlflow_key(self._prefix + metric)
            value = float(number)
            logged_value = self._logged.pop((name, step), None)
            if logged_value is not None:
                self._compare(name, step, logged_value, value)
                continue
            is_finite = math.isfinite(value)
            values[name] = value if is_finite else str(value)
            if not is_finite and name not in self._not_finite:
                self._not_finite.add(name)
                self.spool.append(tags={mlflow_key(f"not_finite.{name}"): f"{value} at step {step}"})
        if values:
            self.spool.append(step=step, metrics=values)

    def _compare(
        self,
        name: str,
        step: int,
        logged_value: float,
        value: float,
    ) -> None:
        # By text, because NaN differs from itself.
        differs = not name.startswith(_MEASURED) and repr(logged_value) != repr(value)
        if differs and not self._warned_of_other_bits:
            self._warned_of_other_bits = True
            _log.warning(
                "not resumed bit for bit: %s at step %d was %s and is now %s (a GPU, another machine or another number "
                "of threads rounds differently, or a plugin has state that no checkpoint contains)",
                name,
                step,
                logged_value,
                value,
            )

    def mark(self) -> int:
        """The place in the spool from which a training that resumes here has to read."""
        self._logged = {(name, step): value for (name, step), value in self._logged.items() if step >= self.step}
        return self._cursor if self._logged else self.spool.size

    def sync(self) -> None:
        """Makes durable what was logged so far; ``OSError`` if the disk refuses it."""
        if not self.spool.sync():
            raise OSError(errno.ENOSPC, "the disk refuses the run's metrics")


def _values_since(spool: Path, cursor: int, step: int) -> dict[tuple[str, int], float]:
    """Returns the metrics that a dead process logged after a checkpoint, by name and step."""
    values = {}
    for line, _ in lines(spool, cursor):
        if line.step < step:
            continue
        for name, value in line.metrics.items():
            # The use of the machine is sampled by time, and belongs to no step.
            if not name.startswith("system/"):
                values[name, line.step] = value
    return values
