"""Carries a run's spool to MLflow, in batches and from where it last stopped."""

import logging
import math
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.system.faults import reach
from runner.system.files import write_durably
from runner.tracking.lines import Line, lines
from runner.tracking.spool import place_of, reached, whole_size
from runner.tracking.store import Metric, Store

_BATCH_RECORDS = 500
_log = logging.getLogger(__name__)


@dataclass
class _Batch:
    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: list[tuple[str, str]] = field(default_factory=list)
    end: tuple[str, int] | None = None
    lines: int = 0

    def add(self, line: Line) -> None:
        self.lines += 1
        self.metrics += [(key, _drawable(value), line.t, line.step) for key, value in line.metrics.items()]
        self.params |= line.params
        self.tags |= line.tags
        if line.artifact is not None:
            self.artifacts.append((line.artifact, line.folder))
        if line.status is not None:
            self.end = (line.status, line.t)


def _drawable(number: float) -> float:
    """NaN for an infinity, which MLflow would store as the largest float, flattening the curve it belongs to."""
    return math.nan if math.isinf(number) else number


class Shipper:
    """Reads records from the spool and writes them to MLflow.

    The place reached is kept in ``spool.offset`` beside the spool and moves on after MLflow has taken a batch. A
    process that dies in between sends that batch again, which changes nothing: MLflow keeps one row for equal key,
    value, time and step.
    """

    def __init__(self, store: Store, run_id: str, spool: Path) -> None:
        self._store = store
        self._run_id = run_id
        self._spool = spool
        self._offset = reached(spool)
        self._failing = False
        self._abandoned = threading.Event()

    @property
    def pending(self) -> int:
        """Bytes of the spool that MLflow does not have yet."""
        return max(0, whole_size(self._spool) - self._offset)

    def ship(self) -> None:
        """Sends everything that is in the spool now.

        Raises:
            MlflowException: the store cannot be reached.
            OSError: an artifact cannot be copied.
        """
        batch = _Batch()
        offset = self._offset
        for line, offset in lines(self._spool, self._offset):
            batch.add(line)
            if batch.lines == _BATCH_RECORDS:
                self._deliver(batch, offset)
                batch = _Batch()
            if self._abandoned.is_set():
                return
        if batch.lines:
            self._deliver(batch, offset)

    def try_to_ship(self) -> bool:
        """Ships; says once when MLflow stops answering and once when it answers again."""
        try:
            self.ship()
        except Exception as error:  # MLflow raises whatever its database and network drivers raise
            if not self._failing:
                reason = str(error).partition("\n")[0]
                _log.warning("MLflow does not take metrics; they wait in %s (%s)", self._spool, reason)
            self._failing = True
            return False
        if self._failing:
            _log.warning("MLflow takes metrics again; nothing was lost")
        self._failing = False
        return True

    def abandon(self) -> None:
        """Makes a ``ship`` that is under way in another thread end after its batch."""
        self._abandoned.set()

    def set_status(self, status: str, time_ms: int) -> None:
        """Sets the run's status past the spool, for a disk that does not take it.

        Raises:
            MlflowException: the store cannot be reached.
        """
        self._store.set_status(self._run_id, status, time_ms)

    def _deliver(self, batch: _Batch, offset: int) -> None:
        self._store.send(self._run_id, batch.metrics, batch.params, batch.tags)
        if batch.end is not None:
            self._store.set_status(self._run_id, *batch.end)
        for path, folder in batch.artifacts:  # last, because they may have a disk of their own, with its own troubles
            self._copy(self._spool.parent / path, folder)
        self._offset = offset
        with suppress(OSError):  # a full disk: then the next process sends again what MLflow has
            reach("ship.sent")
            write_durably(place_of(self._spool), str(offset))
            reach("ship.placed")

    def _copy(self, path: Path, folder: str) -> None:
        if not _stays_inside(self._spool.parent, path, folder):
            _log.warning("artifact %s leads out of the run's folder and was not logged", path)
        elif not path.exists():
            _log.warning("artifact %s no longer exists and could not be logged", path)
        elif path.is_dir():
            self._store.client.log_artifacts(self._run_id, str(path), folder or None)
        else:
            self._store.client.log_artifact(self._run_id, str(path), folder or None)


def _stays_inside(run_dir: Path, path: Path, folder: str) -> bool:
    """Whether a spool, which somebody may have changed, names files of this run only, and no link to others."""
    if "\0" in f"{path}{folder}":
        return False
    inside = [path, *path.rglob("*")] if path.is_dir() else [path]
    parts = Path(folder).parts
    return (
        path.resolve().is_relative_to(run_dir.resolve())
        and not any(each.is_symlink() for each in inside)
        and not Path(folder).is_absolute()
        and ".." not in parts
    )
