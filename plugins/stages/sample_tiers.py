"""Two tiers for samples: the memory of a process, and a folder that processes and runs share."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from .sample_files import copy_tree, decode_sample, encode_sample, sample_bytes

_log = logging.getLogger(__name__)
_SUFFIX = ".sample"
_FOLDER_SAMPLES = 1000
"""Samples of a folder; file systems are slow with a million."""
_FILLED_AFTER_EVICTION = 0.9
"""Share of the limit that is left when files are removed, so that not every new one removes some."""
_RECOUNTED_SHARE = 1 / 16
"""Share of the limit after whose bytes a process counts the files of all processes again."""
_ABANDONED_SECONDS = 3600
_numbers = itertools.count()


class Slot(NamedTuple):
    """The place of a sample: the key of its dataset, and its number."""

    key: str
    number: int


class MemoryTier:
    """The most recently used samples, up to a limit in bytes.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._samples: OrderedDict[Slot, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, slot: Slot) -> Any:
        """Returns a copy of a sample; None if it is not there."""
        entry = self._samples.get(slot)
        if entry is None:
            return None
        self._samples.move_to_end(slot)
        return copy_tree(entry[0])

    def put(self, slot: Slot, sample: Any) -> list[tuple[Slot, Any]]:
        """Keeps a sample, and returns those that have to leave, the least recently used first."""
        size = sample_bytes(sample)
        if size > self.limit:
            return [(slot, sample)]
        self.bytes -= self._samples.pop(slot, (None, 0))[1]
        self._samples[slot] = (sample, size)
        self.bytes += size
        removed = []
        while self.bytes > self.limit:
            old_slot, (old_sample, old_size) = self._samples.popitem(last=False)
            self.bytes -= old_size
            removed.append((old_slot, old_sample))
        return removed

    # Samples are found on disk, or made again, in the process that receives the tier.
    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "bytes": 0, "_samples": OrderedDict()}


class DiskTier:
    """Files of samples in a folder, up to a limit in bytes for all datasets together.

    A file gets its name when it is complete, and has a checksum, so that any number of processes
    may read and write. The least recently used files are removed by one process at a time; while
    several write, the files may exceed the limit by a sixteenth for each of them. After an error
    the tier is off in this process, with one warning.

    Args:
        folder: The folder; it is made if it does not exist.
        limit: Bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.is_on = True
        self._bytes: int | None = None
        """Bytes of all files when they were counted last, and those written since; None before."""
        self._written = 0

    def check(self) -> bool:
        """Returns whether the folder can be written; logs a warning if not."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b"sample")
        except OSError as error:
            self._switch_off(error)
        return self.is_on

    def get(self, slot: Slot) -> Any:
        """Returns a sample; None if it is not there, or its file is damaged."""
        if not self.is_on:
            return None
        path = self._path(slot)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._switch_off(error)
            return None
        try:
            sample = decode_sample(content)
        except Exception:
            # It is made and written again.
            with suppress(OSError):
                path.unlink()
            return None
        # The modification time is that of the last use.
        with suppress(OSError):
            os.utime(path)
        return sample

    def put(self, slot: Slot, sample: Any) -> None:
        """Writes a sample, unless it is there; removes others if the limit is exceeded."""
        if not self.is_on:
            return
        path = self._path(slot)
        try:
            if path.exists():
                return
            content = encode_sample(sample)
            if len(content) > self.limit:
                return
            self._make_room(len(content))
            self._write(path, content)
        except OSError as error:
            self._switch_off(error)

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.partial")
        try:
            # Without fsync: a file that a crash has damaged is found by its checksum.
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        self._written += len(content)
        self._bytes = (self._bytes or 0) + len(content)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used files if one of that size would exceed the limit."""
        is_outdated = self._written > _RECOUNTED_SHARE * self.limit
        if self._bytes is None or is_outdated:
            self._bytes = sum(file.size for file in self._files())
            self._written = 0
        if self._bytes + size <= self.limit:
            return
        with suppress(Timeout), FileLock(self.folder / ".lock", timeout=10):
            files = sorted(self._files())
            self._bytes = sum(file.size for file in files)
            goal = min(_FILLED_AFTER_EVICTION * self.limit, self.limit - size)
            for file in files:
                if self._bytes <= goal:
                    break
                # Another process may have removed it.
                with suppress(FileNotFoundError):
                    file.path.unlink()
                self._bytes -= file.size

    def _files(self) -> Iterator[_File]:
        """Yields all files of samples; removes those that a killed process has left."""
        for root, _, names in os.walk(self.folder):
            for name in names:
                path = Path(root, name)
                with suppress(FileNotFoundError):
                    status = path.stat()
                    age = time.time() - status.st_mtime
                    if name.endswith(_SUFFIX):
                        yield _File(status.st_mtime_ns, str(path), status.st_size, path)
                    elif name.endswith(".partial") and age > _ABANDONED_SECONDS:
                        path.unlink()

    def _path(self, slot: Slot) -> Path:
        thousand = str(slot.number // _FOLDER_SAMPLES)
        return self.folder / slot.key / thousand / f"{slot.number}{_SUFFIX}"

    def _switch_off(self, error: OSError) -> None:
        self.is_on = False
        reason = error.strerror or str(error)
        _log.warning(
            "sample_cache: the folder %s cannot be used (%s); the training continues without it",
            self.folder,
            reason,
        )


class _File(NamedTuple):
    """A file of a sample; files are sorted by the time of their last use."""

    used: int
    name: str
    size: int
    path: Path
