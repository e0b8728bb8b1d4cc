"""The file of an ablation, to which every measurement is a durable line."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.ablation.case_log import CaseLog, Entry
from runner.system.errors import UsageError
from runner.system.files import make_folder, open_file, sync, write_durably
from runner.system.secrets import redact_values
from runner.system.stored_json import json_text

ROUNDS = "rounds.jsonl"
HEAD = "ablation.json"


class MeasurementLog:
    """The lines of one ablation in its folder; the identity of the ablation is stored next to them.

    A UsageError if another process measures in the folder.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        make_folder(folder)
        descriptor = open_file(folder / ROUNDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            reason = (
                "another process measures in this folder; wait for it, or name another"
            )
            raise UsageError(f"{folder}: {reason}") from None
        if not (folder / HEAD).exists():
            write_durably(folder / HEAD, json_text(identity, indent=1) + "\n")
        data = (folder / ROUNDS).read_bytes()
        # A crash may have left an incomplete last line.
        complete = data[: data.rfind(b"\n") + 1]
        self._file.truncate(len(complete))
        self.entries: list[Entry] = []
        for line in complete.splitlines():
            with suppress(ValueError):
                self.entries.append(json.loads(line))
        spent = {entry["session"]: float(entry["spent"]) for entry in self.entries}
        measured = {entry["session"] for entry in self.entries if "update" in entry}
        self.earlier_seconds = sum(spent[session] for session in measured)
        self._session = 1 + max(spent, default=0)
        self._started = time.monotonic()
        sync(folder)

    @property
    def seconds(self) -> float:
        """Returns the seconds of all sessions so far."""
        return self.earlier_seconds + time.monotonic() - self._started

    def of(self, case: str) -> CaseLog:
        """Returns the lines about the case of that name."""
        return CaseLog([entry for entry in self.entries if entry.get("case") == case])

    def add(self, **entry: Any) -> None:
        """Adds a line, which is durable when this returns; an OSError if the disk does not take
        it.
        """
        spent = round(time.monotonic() - self._started, 3)
        line = {"session": self._session, "spent": spent, **redact_values(entry)}
        self._file.write((json.dumps(line) + "\n").encode())
        os.fsync(self._file)
        self.entries.append(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def identity_of(folder: Path) -> dict[str, Any] | None:
    """Returns the identity of the ablation in a folder; None if there is none."""
    with suppress(OSError, ValueError):
        identity = json.loads((folder / HEAD).read_text(encoding="utf-8"))
        # A file of this name may be the user's.
        if isinstance(identity, dict):
            return identity
    return None
