"""A file that keeps plans for convolutions between processes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from runner.api import UsageError, replacing, sealed, split_sealed

MOST_PLANS = 1024
VERSION = 1
LOCK_SECONDS = 10.0
_log = logging.getLogger(__name__)


class Plans(Protocol):
    """Keeps plans, by the text of ``plan_key``."""

    def get(self, key: str) -> Any:
        """Returns a plan as ``Plan.data`` returned it; None if there is none."""

    def put(self, key: str, plan: Mapping[str, str]) -> None:
        """Keeps a plan."""


class NoPlans:
    """Keeps nothing: the slot ``conv_plans`` without a stage."""

    def get(self, key: str) -> None:
        """Returns None."""

    def put(self, key: str, plan: Mapping[str, str]) -> None:
        """Does nothing."""


_NO_PLANS = NoPlans()


def no_plans() -> Plans:
    """Returns what keeps nothing."""
    return _NO_PLANS


class RecentPlans:
    """Keeps the most recently used plans in memory."""

    def __init__(self) -> None:
        self._plans: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Returns a plan, which becomes the most recent one; None if there is none."""
        # A dictionary is ordered by insertion: what was used last is removed last.
        plan = self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan
        return plan

    def put(self, key: str, plan: Mapping[str, str]) -> None:
        """Keeps a plan, and forgets the one that was not used for the longest time."""
        self._plans.pop(key, None)
        self._plans[key] = dict(plan)
        self._trim()

    def _trim(self) -> None:
        while len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]

    def __len__(self) -> int:
        return len(self._plans)

    def items(self) -> dict[str, Any]:
        """Returns all plans, the most recent one last."""
        return dict(self._plans)


class FilePlans(RecentPlans):
    """Keeps plans in a file that identical machines can share.

    The file is JSON with a checksum. It is replaced in one step under a lock, so that several
    processes can add plans at the same time. A file that is damaged, or that was written on another
    machine, is ignored with one warning and replaced by the next plan.

    Args:
        folder: Where the file is; its name contains a digest of the machine.
        machine: Processor, threads, device and versions.

    Raises:
        UsageError: The folder cannot be written.
    """

    def __init__(self, folder: Path, machine: Mapping[str, Any]) -> None:
        super().__init__()
        self.machine = dict(machine)
        self.path = folder / f"plans-{machine_digest(machine)}.json"
        self._lock = FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS)
        self._is_warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._merge()
        except (OSError, Timeout) as error:
            reason = getattr(error, "strerror", None) or error
            fix = "set optimization.plan_cache.folder to a folder that you can write"
            raise UsageError(f"plan_cache: {folder}: {reason}; {fix}") from None

    def put(self, key: str, plan: Mapping[str, str]) -> None:
        """Keeps a plan, also for other processes."""
        super().put(key, plan)
        try:
            with self._lock:
                # Another process may have added plans since the file was read.
                self._merge()
                values = {
                    "version": VERSION,
                    "machine": self.machine,
                    "plans": self.items(),
                }
                with replacing(self.path) as partial:
                    partial.write_text(sealed(values), encoding="utf-8")
        # Without the file, only another process has to search again.
        except (OSError, Timeout) as error:
            self._warn(
                f"cannot be written: {getattr(error, 'strerror', None) or error}"
            )

    def _merge(self) -> None:
        """Adds the plans of the file; those that this process has used are more recent."""
        recent = self.items()
        older = {key: plan for key, plan in self._read().items() if key not in recent}
        self._plans = older | recent
        self._trim()

    def _read(self) -> dict[str, Any]:
        """Returns the plans of the file; none if it cannot be used."""
        try:
            values, is_intact = split_sealed(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"is ignored, because it {_reason(error)}")
            return {}
        plans = values.get("plans")
        problem = None
        if not is_intact:
            problem = "its checksum is wrong"
        elif values.get("version") != VERSION:
            problem = (
                f"it has version {values.get('version')!r:.20}, and this is {VERSION}"
            )
        # JSON turns tuples into lists, so both sides are compared after a conversion.
        elif values.get("machine") != json.loads(json.dumps(self.machine)):
            problem = "it was written on another machine"
        elif not isinstance(plans, dict):
            problem = "it has no plans"
        if problem is not None:
            self._warn(f"is ignored, because {problem}")
            return {}
        assert isinstance(plans, dict)
        return plans

    def _warn(self, text: str) -> None:
        # Every plan would repeat the same warning.
        if not self._is_warned:
            self._is_warned = True
            _log.warning("%s %s", self.path, text)


def machine_digest(machine: Mapping[str, Any]) -> str:
    """Returns a text that identical machines have in common."""
    text = json.dumps(machine, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
        return "is no JSON"
    return str(error)
