"""An append-only file that every record reaches before MLflow does.

One JSON object a line. A record that ``append`` has taken survives the death of the process at once and, after the
next ``sync``, that of the machine. Reading stops before a line that is not whole yet.
"""

import errno
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.system.faults import reach
from runner.system.secrets import redact_values

Record = Mapping[str, Any]

_HELD_LINES = 10_000
_log = logging.getLogger(__name__)


class Spool:
    """Appends records to a file; safe to call from several threads.

    Lines that the disk refuses are held in memory (the latest 10,000) and written when it takes them again, so that a
    full disk does not stop a training.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and cuts off a line that an earlier process left half written.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        self.path = path
        self._lock = threading.Lock()
        self._held: deque[bytes] = deque(maxlen=_HELD_LINES)
        self._warned = False
        self._synced = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = whole_size(path)
        os.ftruncate(self._file, self._size)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    @property
    def held(self) -> int:
        """Number of lines that are in memory only, because the disk refuses them."""
        return len(self._held)

    def append(self, record: Record, *, urgent: bool = False) -> None:
        """Writes one record to the operating system, its secrets masked.

        Costs some microseconds and never raises for a full disk.

        Args:
            record: plain data.
            urgent: whether it goes before what the disk has refused so far, and is durable at once.
        """
        line = _line(redact_values(record))
        with self._lock:
            if urgent:
                self._held.appendleft(line.encode())
            else:
                self._held.append(line.encode())
            self._write_held(1 if urgent else len(self._held))
        if urgent:
            self._keep(self._size)

    def _write_held(self, lines: int) -> None:
        try:
            for _ in range(lines):
                self._write(self._held[0])
                self._held.popleft()
        except OSError as error:
            self._warn(error, f"the latest {_HELD_LINES} lines are held in memory until it can be written")

    def _warn(self, error: OSError, consequence: str) -> None:
        if not self._warned:
            _log.warning("%s: %s; %s", self.path, error.strerror, consequence)
        self._warned = True

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)
        try:
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reach("spool.append", self.path, written)
        except OSError:
            os.ftruncate(self._file, self._size)  # leave no half line in the middle of the file
            raise
        self._size += written

    def sync(self) -> bool:
        """Asks the disk to keep what has been appended so far, and offers it again what it has refused.

        Returns:
            Whether the disk keeps all of it.
        """
        with self._lock:
            self._write_held(len(self._held))
            size = self._size
        return self._keep(size) and not self._held

    def _keep(self, size: int) -> bool:
        if size > self._synced:
            try:
                reach("spool.sync")
                os.fsync(self._file)
            except OSError as error:
                self._warn(error, "its latest lines are lost if this machine stops now")
                return False
            self._synced = size
        return True

    def close(self) -> None:
        """Syncs and closes the file."""
        self.sync()
        os.close(self._file)


def read(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields every whole record from a byte offset on, each with the offset after it.

    A damaged line (a machine that lost power can leave one) is an empty record, with a warning.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                _log.warning("%s: skipped a damaged line that ends at byte %d", path, offset)
                record = {}
            yield record, offset


def place_of(spool: Path) -> Path:
    """The file beside a spool that says how many of its bytes MLflow has."""
    return spool.with_suffix(".offset")


def reached(spool: Path) -> int:
    """How many bytes of a spool MLflow has; 0 if that cannot be read, because sending twice does no harm."""
    try:
        offset = int(place_of(spool).read_bytes())
        with spool.open("rb") as file:
            file.seek(offset - 1)  # a negative number is refused
            return offset if file.read(1) == b"\n" else 0
    except (OSError, ValueError):
        return 0


def unsent(spool: Path) -> int:
    """Bytes in whole lines of a spool that MLflow does not have."""
    try:
        return max(0, whole_size(spool) - reached(spool))
    except OSError:
        return 0


def whole_size(path: Path) -> int:
    """Bytes of a file up to and with its last line break."""
    position = path.stat().st_size
    with path.open("rb") as file:
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


def _line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
