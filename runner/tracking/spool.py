"""A run's spool, which everything that is logged reaches before MLflow does, and what carries it there.

One JSON object per line. A record that ``append`` has accepted survives the end
of the process immediately and, after the next ``sync``, that of the machine.
Reading stops before an incomplete line.
"""

import errno
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from runner.system.faults import reach
from runner.system.files import open_file, read_regular, write_durably
from runner.system.secrets import redact_values
from runner.tracking.record import Status
from runner.tracking.store import Metric, Store

_HELD_LINES = 10_000
_BATCH_LINES = 500
_MAX_LINE_BYTES = 16 * 2**20
_MAX_OFFSET_BYTES = 32
_log = logging.getLogger(__name__)
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Spool:
    """Appends records to a file; safe to call from several threads.

    Lines that the disk refuses are ``held`` in memory (the latest 10,000) and written when it takes them again, so that
    a full disk does not stop a training.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and cuts off a line that an earlier process left half written."""
        self.path = path
        self.held: deque[bytes] = deque(maxlen=_HELD_LINES)
        self._lock = threading.Lock()
        self._warned = False
        self._synced = 0
        self._file = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.size = _whole_size(path)
        os.ftruncate(self._file, self.size)

    def append(self, *, urgent: bool = False, **record: Any) -> None:
        """Writes what a ``Line`` has to the operating system, its secrets masked; never raises for a full disk.

        ``t`` is the time of this call unless it is given. Urgent records precede those that the
        disk has refused so far, and are durable immediately.
        """
        timed = {"t": time.time_ns() // 1_000_000, **record}
        text = json.dumps(redact_values(timed), separators=(",", ":"), allow_nan=False)
        line = text.encode() + b"\n"
        with self._lock:
            if urgent:
                self.held.appendleft(line)
                self._write_held(1)
            else:
                self.held.append(line)
                self._write_held(len(self.held))
        if urgent:
            self._keep()

    def sync(self) -> bool:
        """Requests durability of all records, also of those that the disk has refused before;
        returns whether it was successful.
        """
        with self._lock:
            self._write_held(len(self.held))
            # Inside the lock, because a line that another thread is writing is held, too.
            is_refused = bool(self.held)
        return self._keep() and not is_refused

    def close(self) -> bool:
        """Syncs and closes the file; whether the disk has all that has been appended."""
        durable = self.sync()
        os.close(self._file)
        return durable

    def _write_held(self, count: int) -> None:
        try:
            for _ in range(count):
                written = os.write(self._file, self.held[0])
                if written < len(self.held[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                reach("spool.append", self.path, written)
                self.size += written
                self.held.popleft()
        except OSError as error:
            with suppress(OSError):
                # Leaves no half line in the middle of the file.
                os.ftruncate(self._file, self.size)
            self._warn(error, f"the latest {_HELD_LINES} lines are held in memory until it can be written")

    def _keep(self) -> bool:
        # Read before the sync, because other threads continue to write.
        size = self.size
        if size > self._synced:
            try:
                reach("spool.sync")
                os.fsync(self._file)
            except OSError as error:
                self._warn(error, "its latest lines are lost if this machine stops now")
                return False
            self._synced = size
        return True

    def _warn(self, error: OSError, consequence: str) -> None:
        if not self._warned:
            _log.warning("%s: %s; %s", self.path, error.strerror, consequence)
        self._warned = True


class LoggedData(BaseModel, frozen=True):
    """The data of a run."""

    name: str
    digest: str
    """Digest of their description."""
    profile: str
    """Their settings, as JSON."""


class Line(BaseModel, frozen=True):
    """The content of a line of a spool, which may have been changed, or damaged by a failing
    disk.
    """

    t: _Count
    """When it was logged, in milliseconds since 1970."""
    step: _Count = 0
    metrics: dict[str, float] = {}
    params: dict[str, str] = {}
    tags: dict[str, str] = {}
    artifact: str | None = None
    """A path inside the run's folder."""
    model: str | None = None
    """A folder inside the run's, which is the run's model."""
    dataset: LoggedData | None = None
    status: Literal["RUNNING"] | Status | None = None


def lines(spool: Path, offset: int = 0) -> Iterator[tuple[Line, int]]:
    """Yields every complete line from a byte offset on, each with the offset after it; none if
    there is no file.

    A line that was damaged, for example by a loss of power, is skipped with a warning.
    """
    if not spool.exists():
        return
    with open(open_file(spool, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        while text := file.readline(_MAX_LINE_BYTES):
            if not text.endswith(b"\n"):
                return
            offset += len(text)
            try:
                line = Line.model_validate_json(text)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                _log.warning("%s: skipped the damaged line that ends at byte %d: %s", spool, offset, reason)
                line = Line(t=0)
            yield line, offset


def offset_file(spool: Path) -> Path:
    """Returns the file next to a spool with the number of bytes that MLflow has."""
    return spool.with_suffix(".offset")


def reached(spool: Path) -> int:
    """Returns the number of bytes of a spool that MLflow has; 0 if that cannot be read, because
    sending twice is harmless.
    """
    try:
        offset = int(read_regular(offset_file(spool), _MAX_OFFSET_BYTES))
        with open(open_file(spool, os.O_RDONLY), "rb") as file:
            # The system refuses a negative number, and the result is then 0.
            file.seek(offset - 1)
            return offset if file.read(1) == b"\n" else 0
    except (OSError, ValueError):
        return 0


def unsent(spool: Path) -> int:
    """Returns the bytes in complete lines of a spool that MLflow does not have."""
    try:
        return max(0, _whole_size(spool) - reached(spool))
    except OSError:
        return 0


def _whole_size(path: Path) -> int:
    """Bytes of a file up to and with its last line break."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = file.seek(max(0, end - 65536))
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                return start + position + 1
            end = start
    return 0


class Shipper:
    """Reads a spool and writes it to an MLflow run, in batches and from where it last stopped.

    The place reached moves on after MLflow has taken a batch. A process that dies in between sends that batch again,
    which changes nothing: MLflow keeps one row for equal key, value, time and step.
    """

    def __init__(self, store: Store, run_id: str, spool: Path) -> None:
        self._store = store
        self._run_id = run_id
        self._spool = spool
        self._offset = reached(spool)
        self._failing = False
        self.abandoned = threading.Event()
        """Once set, a ``ship`` that is under way in another thread ends after its batch."""

    @property
    def pending(self) -> int:
        """Bytes of the spool that MLflow does not have yet."""
        return max(0, _whole_size(self._spool) - self._offset)

    def ship(self) -> bool:
        """Sends everything that is in the spool now, and returns whether it was not abandoned before the end.

        Raises whatever MLflow's database and network drivers raise.
        """
        pending_lines = lines(self._spool, self._offset)
        while not self.abandoned.is_set():
            batch = list(islice(pending_lines, _BATCH_LINES))
            if not batch:
                return True
            self.deliver([line for line, _ in batch])
            _, self._offset = batch[-1]
            # If the disk is full, the next process sends this batch again, which changes nothing.
            with suppress(OSError):
                reach("ship.sent")
                write_durably(offset_file(self._spool), str(self._offset))
                reach("ship.placed")
        return False

    def try_to_ship(self) -> bool:
        """Sends records; reports once when MLflow becomes unreachable and once
        when it is available again.
        """
        try:
            is_complete = self.ship()
        except Exception as error:
            if not self._failing:
                reason = str(error).partition("\n")[0]
                _log.warning("MLflow does not take metrics; they wait in %s (%s)", self._spool, reason)
            self._failing = True
        else:
            if not is_complete:
                return False
            if self._failing:
                _log.warning("MLflow takes metrics again; nothing was lost")
            self._failing = False
        return not self._failing

    def deliver(self, batch: list[Line]) -> None:
        """Sends the content of lines, whether or not they are in the spool."""
        metrics: list[Metric] = []
        params: dict[str, str] = {}
        tags: dict[str, str] = {}
        for line in batch:
            params |= line.params
            tags |= line.tags
            for key, value in line.metrics.items():
                # Infinities become NaN: MLflow would store the largest float, flattening the curve it belongs to.
                number = math.nan if math.isinf(value) else value
                metrics.append((key, number, line.t, line.step))
        self._store.send(self._run_id, metrics, params, tags)

        ends = [(line.status, line.t) for line in batch if line.status]
        if ends:
            self._store.set_status(self._run_id, *ends[-1])
        # Artifacts come last, because their disk may have separate problems.
        for line in batch:
            self._deliver_files(line)

    def _deliver_files(self, line: Line) -> None:
        folder = self._spool.parent
        dataset = line.dataset
        if dataset is not None:
            self._store.log_dataset(self._run_id, dataset.name, dataset.digest, dataset.profile)
        if line.artifact is not None and self._belongs_to_run(folder / line.artifact):
            self._store.log_artifact(self._run_id, folder / line.artifact)
        if line.model is not None and self._belongs_to_run(folder / line.model):
            self._store.log_model(self._run_id, folder / line.model, line.step)

    def _belongs_to_run(self, path: Path) -> bool:
        """Returns whether a file belongs to the run; a manipulated spool may name others, or
        links.
        """
        folder = self._spool.parent.resolve()
        is_inside = "\0" not in str(path) and path.resolve().is_relative_to(folder)
        if not is_inside or any(entry.is_symlink() for entry in [path, *path.rglob("*")]):
            _log.warning("artifact %s leads out of the run's folder and was not logged", path)
        elif not all(map(_is_regular, [path, *path.rglob("*")])):
            _log.warning("artifact %s is neither a file nor a folder of files and was not logged", path)
        elif not path.exists():
            _log.warning("artifact %s no longer exists and could not be logged", path)
        else:
            return True
        return False


def _is_regular(path: Path) -> bool:
    """Returns whether a path is a file or a folder, or does not exist."""
    return path.is_file() or path.is_dir() or not path.exists()
