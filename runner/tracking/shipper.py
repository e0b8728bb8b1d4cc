"""Carries a run's spool to MLflow, in batches and from where it last stopped."""

import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.tracking.spool import read
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
    records: int = 0

    def add(self, record: dict[str, Any]) -> None:
        self.records += 1
        self.metrics += [
            (key, _drawable(value), record["t"], record["step"]) for key, value in _items(record, "metrics")
        ]
        self.params.update(_items(record, "params"))
        self.tags.update(_items(record, "tags"))
        if "artifact" in record:
            self.artifacts.append((record["artifact"], record["folder"]))
        if "status" in record:
            self.end = (record["status"], record["t"])


def _drawable(value: float | str) -> float:
    """NaN for an infinity, which MLflow would store as the largest float, flattening the curve it belongs to."""
    number = float(value)
    return math.nan if math.isinf(number) else number


def _items(record: dict[str, Any], kind: str) -> Any:
    return record.get(kind, {}).items()


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
        self._place = spool.with_suffix(".offset")
        self._offset = int(self._place.read_text()) if self._place.exists() else 0
        self._failing = False

    @property
    def pending(self) -> int:
        """Bytes of the spool that MLflow does not have yet."""
        return self._spool.stat().st_size - self._offset

    def ship(self) -> None:
        """Sends everything that is in the spool now.

        Raises:
            MlflowException: the store cannot be reached.
            OSError: an artifact cannot be copied, or the place not be written.
        """
        batch = _Batch()
        offset = self._offset
        for record, offset in read(self._spool, self._offset):
            batch.add(record)
            if batch.records == _BATCH_RECORDS:
                self._deliver(batch, offset)
                batch = _Batch()
        if batch.records:
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

    def _deliver(self, batch: _Batch, offset: int) -> None:
        self._store.send(self._run_id, batch.metrics, batch.params, batch.tags)
        for path, folder in batch.artifacts:
            self._copy(self._spool.parent / path, folder)
        if batch.end is not None:
            self._store.client.set_terminated(self._run_id, *batch.end)
        beside = self._place.with_suffix(".offset.new")
        beside.write_text(str(offset))
        os.replace(beside, self._place)
        self._offset = offset

    def _copy(self, path: Path, folder: str) -> None:
        if not path.exists():
            _log.warning("artifact %s no longer exists and could not be logged", path)
        elif path.is_dir():
            self._store.client.log_artifacts(self._run_id, str(path), folder or None)
        else:
            self._store.client.log_artifact(self._run_id, str(path), folder or None)
