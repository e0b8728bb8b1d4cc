"""What an ablation has measured so far, durable line by line, so that an interrupted one can go on."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.system.errors import UsageError
from runner.system.files import sync, write_durably
from runner.system.secrets import redact_values

ROUNDS, HEAD, RESULT = "rounds.jsonl", "ablation.json", "result.json"

Entry = dict[str, Any]
"""One line: whose it is (``case``, ``variant``) and what was measured."""


class MeasurementLog:
    """The folder of one ablation.

    Args:
        folder: made if need be.
        identity: what is measured and on which machine; kept in the folder, to tell whether an ablation is the same.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / ROUNDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise UsageError(
                f"{folder}: another process measures in this folder; wait for it, or name another"
            ) from None
        if not (folder / HEAD).exists():
            write_durably(folder / HEAD, json.dumps(identity, indent=1) + "\n")
        self.entries = list(_read(folder / ROUNDS))
        self.earlier_seconds = _seconds_of(self.entries)
        self._started = time.monotonic()
        self._session = 1 + max((entry["session"] for entry in self.entries), default=0)
        _end_torn_line(folder / ROUNDS, self._file)
        sync(folder)

    @property
    def seconds(self) -> float:
        """Spent in all sessions so far."""
        return self.earlier_seconds + time.monotonic() - self._started

    def add(self, **entry: Any) -> None:
        """Adds a line, which is durable when this returns.

        Raises:
            OSError: the disk does not take it.
        """
        spent = round(time.monotonic() - self._started, 3)
        whole = {"session": self._session, "spent": spent, **redact_values(entry)}
        os.write(self._file, (json.dumps(whole) + "\n").encode())
        os.fsync(self._file)
        self.entries.append(whole)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def identity_of(folder: Path) -> dict[str, Any] | None:
    """What the ablation in a folder measures; None if there is none."""
    try:
        found = json.loads((folder / HEAD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_finished(folder: Path) -> bool:
    """Whether the ablation in a folder has come to its result."""
    return (folder / RESULT).exists()


def _read(path: Path) -> Iterator[Entry]:
    """Whole lines; what a crash has torn is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("session"), int):
            yield entry


def _end_torn_line(path: Path, descriptor: int) -> None:
    """So that the next line does not become a part of it."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
            os.write(descriptor, b"\n")


def _seconds_of(entries: list[Entry]) -> float:
    last = {entry["session"]: float(entry.get("spent", 0.0)) for entry in entries}
    return sum(last.values())
