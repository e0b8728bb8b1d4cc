"""What an ablation has measured so far, durable line by line, so that an interrupted one can go on."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.system.errors import UsageError
from runner.system.files import sync, write_durably
from runner.system.secrets import redact_values
from runner.verify.variants import AGAIN, BASELINE, BOTH

ROUNDS, HEAD = "rounds.jsonl", "ablation.json"
Entry = dict[str, Any]  # one line: whose it is (``case``, ``variant``) and what was measured


@dataclass(frozen=True)
class CaseLog:
    """The lines about one case."""

    entries: Sequence[Entry]

    def values(self, key: str) -> list[Any]:
        """What lines have under a key, in their order."""
        return [entry[key] for entry in self.entries if key in entry]

    def by_variant(self, key: str) -> dict[str, Any]:
        """The last value that every variant has under a key."""
        return {entry["variant"]: entry[key] for entry in self.entries if key in entry}

    @property
    def rounds(self) -> dict[int, dict[str, float]]:
        """Seconds of one update by round and variant; ``BOTH`` among them."""
        updates = {entry["round"]: entry["update"] for entry in self.entries if "update" in entry}
        return {number: {**own, BOTH: (own[BASELINE] + own[AGAIN]) / 2} for number, own in updates.items()}

    @property
    def failed(self) -> dict[str, str]:
        """Variants that have failed and were not started again since, with the reason."""
        last = {each["variant"]: each.get("failed") for each in self.entries if each.keys() & {"failed", "prepared"}}
        return {name: str(reason) for name, reason in last.items() if reason is not None}

    def ratios(self, name: str, other: str = BOTH) -> list[float]:
        """Seconds of ``other`` / seconds of ``name``, for each round that has them."""
        return [each[other] / each[name] for each in self.rounds.values() if name in each and other in each]


class MeasurementLog:
    """The folder of one ablation; it keeps the identity, to tell whether another one is the same.

    Raises:
        UsageError: another process measures in the folder.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / ROUNDS).open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            reason = "another process measures in this folder; wait for it, or name another"
            raise UsageError(f"{folder}: {reason}") from None
        if not (folder / HEAD).exists():
            write_durably(folder / HEAD, json.dumps(identity, indent=1) + "\n")
        *whole, torn = (folder / ROUNDS).read_bytes().split(b"\n")
        if torn:  # by a crash
            os.truncate(self._file.fileno(), sum(len(line) + 1 for line in whole))
        self.entries: list[Entry] = []
        for line in whole:
            with suppress(ValueError):
                self.entries.append(json.loads(line))
        spent = {entry["session"]: float(entry["spent"]) for entry in self.entries}
        self.earlier_seconds = sum(spent.values())
        self._session = 1 + max(spent, default=0)
        self._started = time.monotonic()
        sync(folder)

    @property
    def seconds(self) -> float:
        """Spent in all sessions so far."""
        return self.earlier_seconds + time.monotonic() - self._started

    def of(self, case: str) -> CaseLog:
        """The lines about the case of that name."""
        return CaseLog([entry for entry in self.entries if entry.get("case") == case])

    def add(self, **entry: Any) -> None:
        """Adds a line, which is durable when this returns.

        Raises:
            OSError: the disk does not take it.
        """
        spent = round(time.monotonic() - self._started, 3)
        whole = {"session": self._session, "spent": spent, **redact_values(entry)}
        self._file.write((json.dumps(whole) + "\n").encode())
        os.fsync(self._file)
        self.entries.append(whole)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def identity_of(folder: Path) -> dict[str, Any] | None:
    """What the ablation in a folder measures; None if there is none."""
    try:
        found = json.loads((folder / HEAD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
