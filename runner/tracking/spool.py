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
        self._size = _whole_lines(path)
        os.ftruncate(self._file, self._size)

    @property
    def held(self) -> int:
        """Number of lines that are in memory only, because the disk refuses them."""
        return len(self._held)

    def append(self, record: Record) -> None:
        """Writes one record to the operating system; costs some microseconds and never raises for a full disk."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            self._held.append(line)
            self._write_held()

    def _write_held(self) -> None:
        try:
            while self._held:
                self._write(self._held[0])
                self._held.popleft()
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _log.warning(
                "%s: %s; the latest %d lines are held in memory until it can be written",
                self.path,
                error.strerror,
                _HELD_LINES,
            )
        self._warned = True

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)
        if written < len(line):  # leave no half line in the middle of the file
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def sync(self) -> None:
        """Asks the disk to keep what has been appended so far, and offers it again what it has refused."""
        with self._lock:
            self._write_held()
            size = self._size
        if size > self._synced:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._warn(error)
            else:
                self._synced = size

    def close(self) -> None:
        """Syncs and closes the file."""
        self.sync()
        os.close(self._file)


def read(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields every whole record from a byte offset on, each with the offset after it.

    A damaged line (a machine that lost power can leave one) is skipped with a warning.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                _log.warning("%s: skipped a damaged line that ends at byte %d", path, offset)
                continue
            yield record, offset


def _whole_lines(path: Path) -> int:
    """Length of the file in bytes up to and with its last line break."""
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
