"""The folder of one run: who it belongs to, and what is known of the run from outside."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from runner.recipe.lock import LOCK_NAME
from runner.system.errors import StorageError, UsageError
from runner.system.files import write_durably
from runner.system.hardware import boot_id
from runner.system.liveness import Owner
from runner.tracking.spool import unsent
from runner.tracking.values import folder_name

RECORD, LOCK, SPOOL, RESERVE = "run.json", ".lock", "spool.jsonl", ".reserve"
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
RESERVE_BYTES = 64 * 2**10
STALE_SECONDS = 600.0
"""A run on another machine is taken for dead when it has not been heard of for so long."""
GLANCE_SECONDS = 1.0
"""Longer than another process looks whether a run is alive, which shares its lock for a moment."""
_CLAIM_SECONDS = 15.0
"""Longer than it mostly takes to send what a dead process has left, which takes the lock too."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Record(BaseModel, frozen=True):
    """What is known of a run from outside, in ``run.json``."""

    name: str
    """``<recipe>-<8 digits>``; the name of the folder and of the run in MLflow."""
    recipe: str
    digest: str
    """Of the recipe."""
    goal: int
    unit: str
    """What ``goal`` and ``step`` count."""
    experiment: str
    tracking_uri: str
    """MLflow's store, without a password."""
    owner: Owner
    started: float
    """Seconds since 1970, as all times here."""
    heartbeat: float
    """When the owner was last seen alive."""
    step: int = 0
    run_id: str | None = None
    """MLflow's id; None until MLflow has the run."""
    status: Literal["RUNNING"] | Status = "RUNNING"
    reason: str = ""
    """Why it failed."""


class RunFolder:
    """A run's folder, which belongs to one process at a time.

    The lock is the operating system's, so it ends with the process that holds it, however that ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / LOCK, thread_local=False)

    @classmethod
    def create(cls, runs: Path, name: str) -> RunFolder:
        """Makes the folder ``<name>-<8 random digits>`` and claims it.

        Raises:
            StorageError: it cannot be made.
        """
        path = runs / f"{folder_name(name)}-{uuid.uuid4().hex[:8]}"
        try:
            path.mkdir(parents=True)
            folder = cls(path)
            folder.claim()
        except (OSError, NotImplementedError) as error:
            raise StorageError(
                f"run folder {path} cannot be made: {getattr(error, 'strerror', None) or error}; "
                "name a writable folder in RUNNER_WORKSPACE"
            ) from error
        return folder

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def spool(self) -> Path:
        """Everything that was logged."""
        return self.path / SPOOL

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def unsent(self) -> int:
        """Bytes of the spool that MLflow does not have."""
        return unsent(self.spool)

    @property
    def last_checkpoint(self) -> int | None:
        """How far the newest checkpoint is, in the recipe's unit; None if there is none that can be read."""
        for path in sorted(self.checkpoints.glob(f"step-*/{MANIFEST}"), reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return int(json.loads(path.read_text().partition("\n")[0])["done"])
        return None

    @property
    def resumable(self) -> str:
        """Empty if the run can be resumed, else why not."""
        record = self.record()
        if record is None:
            return "its run.json cannot be read"
        if record.status == "FINISHED":
            return "it is finished"
        if self.alive():
            return f"process {record.owner.pid} on {record.owner.host} is training it"
        if not (self.path / LOCK_NAME).exists():
            return "it ended before its lock was written"
        return ""

    def record(self) -> Record | None:
        """What is known of the run; None if that cannot be read."""
        try:
            record = Record.model_validate_json((self.path / RECORD).read_bytes())
        except (OSError, ValidationError):
            return None
        is_id = record.run_id is None or re.fullmatch(r"[0-9a-f]{32}", record.run_id)
        return record if is_id and record.name == self.name else None

    def write(self, record: Record) -> None:
        """Replaces the record, durably."""
        write_durably(self.path / RECORD, record.model_dump_json(indent=1) + "\n")

    def reserve(self) -> None:
        """Takes the space in which the end of the run can be written when the disk is full.

        Raises:
            OSError: it is full already.
        """
        (self.path / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))  # zeros would take no space on some disks

    def use_reserve(self) -> None:
        """Gives that space to what is written next."""
        (self.path / RESERVE).unlink(missing_ok=True)

    def claim(self, patience: float = _CLAIM_SECONDS) -> None:
        """Makes the folder this process's own.

        Args:
            patience: seconds to wait for a process that looks after the run; one that trains it is not waited for.

        Raises:
            UsageError: it belongs to another process.
        """
        deadline = time.monotonic() + patience
        while not self._lock.is_locked and not self.alive() and time.monotonic() < deadline:
            with suppress(Timeout):
                self._lock.acquire(timeout=GLANCE_SECONDS)
        if not self._lock.is_locked or self._lives_elsewhere():
            self._lock.release()
            record = self.record() if self.alive() else None
            who = (
                f"process {record.owner.pid} on {record.owner.host} is training it" if record else "it is being synced"
            )
            raise UsageError(f"run {self.name} is in use: {who}")

    def release(self) -> None:
        """Gives the folder up."""
        self._lock.release()

    def alive(self) -> bool:
        """Whether a process is training this run now; any number of processes may ask at once."""
        return self._lock.is_locked or self._lives_here() or self._lives_elsewhere()

    def _lives_here(self) -> bool:
        """Whether the lock is held, and not just by a process that looks after what a dead one has left."""
        if not self._locked_by_another():
            return False
        record = self.record()
        return record is None or record.owner.alive(record.heartbeat) is not False

    def _locked_by_another(self) -> bool:
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: one who looks is not taken for the owner
        except OSError:  # it is locked; and a disk that cannot tell must not make a run seem dead
            return True
        finally:
            os.close(descriptor)
        return False

    def _lives_elsewhere(self) -> bool:
        """Whether a process of another machine, which the lock may not reach, has lately been alive."""
        record = self.record()
        if record is None or record.status != "RUNNING" or record.owner.boot_id == boot_id():
            return False
        lately = time.time() - record.heartbeat < STALE_SECONDS
        return lately and record.owner.alive(record.heartbeat) is not False


def folders(runs: Path) -> list[RunFolder]:
    """All runs of a workspace, the newest first."""
    found = [RunFolder(path.parent) for path in runs.glob(f"*/{RECORD}")]
    started = {folder.path: record.started if (record := folder.record()) else 0.0 for folder in found}
    return sorted(found, key=lambda folder: (started[folder.path], folder.name), reverse=True)


def find(runs: Path, reference: str) -> RunFolder:
    """The run that a person means.

    Args:
        runs: the workspace's runs.
        reference: a name, the digits at its end, MLflow's id, the beginning of any of them, or ``latest``.

    Raises:
        UsageError: no run fits, or several do.
    """
    found = folders(runs)
    if not found:
        raise UsageError(f"{runs} has no runs yet; start one: runner run RECIPE")
    if reference == "latest":
        return found[0]
    exact = [folder for folder in found if folder.name == reference]
    fitting = exact or [folder for folder in found if _fits(folder, reference)]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(folder.name for folder in (fitting or found)[:8])
    if fitting:
        raise UsageError(f"'{reference}' fits {len(fitting)} runs: {shown}")
    raise UsageError(f"no run '{reference}' in {runs}; there are: {shown}")


def _fits(folder: RunFolder, reference: str) -> bool:
    record = folder.record()
    names = [folder.name, folder.name.rpartition("-")[2], (record.run_id if record else None) or ""]
    return bool(reference) and any(name.startswith(reference) for name in names)
