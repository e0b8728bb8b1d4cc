"""The workspace with all runs, and the folder of each run with its record."""

import fcntl
import json
import logging
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout
from pydantic import ValidationError

from runner.system import files
from runner.system.errors import StorageError, UsageError
from runner.system.faults import reach
from runner.system.files import open_file, read_regular, sync, write_durably
from runner.system.processes import boot_id
from runner.system.secrets import REFUSED_NAME, has_secret, redact_values
from runner.system.workspace_paths import LOCK_NAME, RECORD, VARIABLE, sqlite_uri, workspace_root
from runner.tracking.record import STALE_SECONDS, Record

SPOOL = "spool.jsonl"
OBSERVED_SECONDS = 15.0
"""Three heartbeats: for how long a record is watched before its owner on another machine counts as gone."""
TAKEOVER = "--takeover"
"""The option that takes a run over from another machine without watching its record."""
GLANCE_SECONDS = 1.0
"""Longer than another process looks whether a run is alive, which shares its lock for a moment."""
_CLAIM_SECONDS = 15.0
"""Longer than most processes need to send the records of a dead one, which takes the lock too."""
_RESERVE_BYTES = 64 * 2**10
_MAX_RECORD_BYTES = 4 * 2**20
_LONGEST_NAME = 100
_FINISHED = "it is finished"
DIGITS = 8
"""Of MLflow's id, at the end of a name."""

_OWN_DATABASE = "workspace:mlflow.db"
_log = logging.getLogger(__name__)


class Workspace:
    """The folder with MLflow's database, artifacts and runs; this class creates none."""

    def __init__(self, root: Path | str | None = None) -> None:
        """Lies at ``root``, else at ``$RUNNER_WORKSPACE``, else at ``.runner`` in the current folder."""
        # Absolute, because MLflow records absolute places of artifacts.
        self.root = workspace_root(root)
        files.guard(self.root)
        self.runs = self.root / "runs"
        self.ablations = self.root / "ablations"
        self.studies = self.root / "studies"
        self.seeds = self.root / "seeds"
        self.places = (self.runs, self.ablations, self.studies, self.seeds)
        self.artifacts = self.root / "artifacts"
        """Of all runs that a local store records."""
        self.database = self.root / "mlflow.db"
        """Used when ``MLFLOW_TRACKING_URI`` names no other store."""
        self.tracking_uri = os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(self.database)

    def recorded_uri(self, uri: str) -> str:
        """Returns a store's URI for records: only the name for the workspace's database."""
        return _OWN_DATABASE if uri == sqlite_uri(self.database) else uri

    def resolved_uri(self, recorded: str) -> str:
        """Returns the URI that ``recorded_uri`` has shortened."""
        return sqlite_uri(self.database) if recorded == _OWN_DATABASE else recorded


def folder_name(name: str) -> str:
    """The name as a folder can have it on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:_LONGEST_NAME].rstrip("._") or "unnamed"


class RunFolder:
    """A run's folder, which belongs to one process at a time.

    The lock is the operating system's, so it ends with the process that holds it, however that ends.
    """

    _cached: tuple[tuple[int, int, int, str], Record] | None

    def __init__(self, path: Path) -> None:
        self._lie_at(path)
        self._lock = FileLock(self._lock_file, thread_local=False)

    @classmethod
    def create(cls, runs: Path, name: str) -> Self:
        """Makes the folder ``<name>-<8 random digits>`` and claims it, until ``take_name`` gives it those of its run.

        A ``StorageError`` if it cannot be made, a ``UsageError`` if its path would contain a secret.
        """
        if has_secret(str(runs)):
            raise UsageError(f"the path of the workspace ({VARIABLE}) {REFUSED_NAME}")
        if has_secret(name):
            raise UsageError(f"the name of the recipe {REFUSED_NAME}")
        folder = cls(runs / f"{folder_name(name)}-{uuid.uuid4().hex[:DIGITS]}")
        try:
            files.make_folder(folder.path)
            folder.claim()
        except (OSError, NotImplementedError) as error:
            raise StorageError(
                f"run folder {folder.path} cannot be made: {getattr(error, 'strerror', None) or error}; "
                f"name a writable folder in {VARIABLE}"
            ) from error
        return folder

    @property
    def last_checkpoint(self) -> int | None:
        """Returns the newest readable checkpoint's progress in the recipe's unit, or None."""
        for path in sorted(self.checkpoints.glob("step-*/manifest.json"), reverse=True):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return int(json.loads(read_regular(path).partition(b"\n")[0])["done"])
        return None

    @property
    def resumable(self) -> str:
        """Empty if the run can be resumed, else why not."""
        return self.obstacle()

    def obstacle(self, takeover: bool = False) -> str:
        """Returns why the run cannot be resumed; empty if it can.

        With ``takeover`` or after a long silence, a remote owner is no obstacle to ``claim``.
        """
        record = self.record()
        if record is None:
            return "its run.json cannot be read"
        if record.status == "FINISHED":
            return _FINISHED
        may_be_gone = self._lives_elsewhere() and (takeover or record.is_stale)
        if self.alive() and not may_be_gone:
            return f"process {record.owner.pid} on {record.owner.host} is training it"
        return "" if (self.path / LOCK_NAME).exists() else "it ended before its lock was written"

    def refusal(self, takeover: bool = False) -> str:
        """Returns the message about a run that cannot be resumed; empty if it can."""
        reason = self.obstacle(takeover)
        if reason == _FINISHED:
            reason += f"; model.init_from={self.name} starts a new run with its weights"
        return reason and f"run {self.name} cannot be resumed: {reason}"

    def record(self) -> Record | None:
        """Returns the record of the run; None if it cannot be read."""
        try:
            status = os.lstat(self.path / RECORD)
            version = (status.st_ino, status.st_mtime_ns, status.st_size, self.name)
            # A listing reads it several times; each write creates a new file.
            if self._cached is None or self._cached[0] != version:
                record = self._read_record()
                self._cached = (version, record) if record.name == self.name else None
                return record
            return self._cached[1]
        except (OSError, ValueError):
            return None

    def record_problem(self) -> str:
        """Returns what is wrong with the record; empty if nothing is."""
        try:
            self._read_record()
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            field = ".".join(map(str, problem["loc"][:1]))
            return f"{field}: {problem['msg']}" if field else str(problem["msg"])
        except (OSError, ValueError) as error:
            return str(getattr(error, "strerror", None) or error)
        return ""

    def _read_record(self) -> Record:
        record = Record.model_validate_json(read_regular(self.path / RECORD, _MAX_RECORD_BYTES))
        # A renamed or copied folder is not a run, unless its process died while renaming it.
        is_taking_name = record.kind == "run" and not self.spool.exists()
        if record.name != self.name and not is_taking_name:
            raise ValueError(f"it is that of {record.name}")
        return record

    def write(self, record: Record) -> None:
        """Replaces the record, durably."""
        values = record.model_dump(mode="json")
        # Values that the runner has generated are not secrets, even if their digits look like one.
        generated = {key: values[key] for key in ("name", "run_id", "group", "owner", "digest", "digests")}
        text = json.dumps(redact_values(values) | generated, indent=1, ensure_ascii=False)
        write_durably(self.path / RECORD, text + "\n")

    def take_name(self, record: Record, run_id: str) -> Record:
        """Gives the folder, which is claimed, its name for good, which ends with the beginning of MLflow's id.

        Returns the new record; the next ``claim`` completes an interrupted renaming.
        """
        name = f"{folder_name(record.recipe)}-{run_id[:DIGITS]}"
        new_record = record.model_copy(update={"name": name, "run_id": run_id})
        self.write(new_record)
        reach("start.named")
        self._move_to(name)
        return new_record

    def reserve(self) -> None:
        """Takes the space in which the end of the run can be written when the disk is full."""
        with open(open_file(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            # Zeros would take no space on some disks.
            file.write(os.urandom(_RESERVE_BYTES))

    def use_reserve(self) -> None:
        """Gives that space to what is written next."""
        files.remove(self._reserve)

    def claim(self, patience: float = _CLAIM_SECONDS, takeover: bool = False) -> None:
        """Claims the folder; waits for a process that finishes the run, not for one that trains.

        Args:
            patience: Seconds to wait for a process that finishes the run.
            takeover: Whether to take the run over from a process on another machine.

        Raises:
            UsageError: It belongs to another process.
            StorageError: It cannot be written.
        """
        if not self._lock.is_locked and self._lives_elsewhere():
            self.confirm_abandoned(takeover)
            takeover = True
        deadline = time.monotonic() + patience
        while not self._lock.is_locked and (takeover or not self.alive()) and time.monotonic() < deadline:
            try:
                self._lock.acquire(timeout=GLANCE_SECONDS)
            except Timeout:
                continue
            except OSError as error:
                hint = f"use a workspace that can be written: {VARIABLE}"
                raise StorageError(f"{self.path} cannot be written: {error.strerror or error}; {hint}") from error
        if not self._lock.is_locked or (self._lives_elsewhere() and not takeover):
            self._lock.release()
            record = self.record() if self.alive() else None
            owner = f"process {record.owner.pid} on {record.owner.host} is training it" if record else ""
            raise UsageError(f"run {self.name} is in use: {owner or 'it is being synced'}")
        record = self.record()
        if record is not None and record.name != self.name:
            self._move_to(record.name)

    def confirm_abandoned(self, takeover: bool = False) -> None:
        """Returns if the owner of a running record is dead, or if it is on another machine and counts as gone.

        No clock decides alone: an owner on another machine counts as dead if its last heartbeat is
        old and the record does not change meanwhile, or if the user confirms it with ``takeover``.

        Raises:
            UsageError: The owner is alive, or may be.
        """
        record = self.record()
        if record is None or not record.at_work:
            return
        owner = f"process {record.owner.pid} on {record.owner.host}"
        if record.owner.alive:
            raise UsageError(f"{self.name} is in use by {owner}")
        if takeover:
            _log.warning("%s is taken over from %s, which must not be running any more", self.name, owner)
            return
        age = time.time() - record.heartbeat
        last_sign = f"{age:,.0f} s ago" if age >= 0 else f"{-age:,.0f} s in the future"
        refusal = f"{self.name} may be in use by {owner}, whose last sign of life is {last_sign}"
        if age < STALE_SECONDS:
            raise UsageError(f"{refusal}; if that machine is gone, add {TAKEOVER}")
        _log.warning("%s was last in use by %s; watching it for %.0f s", self.name, owner, OBSERVED_SECONDS)
        deadline = time.monotonic() + OBSERVED_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(GLANCE_SECONDS, OBSERVED_SECONDS))
            current = self.record()
            if current is not None and current.heartbeat != record.heartbeat:
                raise UsageError(f"{self.name} is in use by {owner}, which has just written to it")

    def release(self) -> None:
        """Gives the folder up."""
        self._lock.release()
        # The folder may have been renamed since it was claimed.
        self._lock = FileLock(self._lock_file, thread_local=False)

    def alive(self) -> bool:
        """Returns whether a process is training this run now, for any number of callers."""
        if self._lock.is_locked:
            return True
        record = self.record()
        if record is not None and record.owner.alive is False:
            # The holder of the lock finishes the run of a dead process.
            return False
        try:
            with open(open_file(self._lock_file, os.O_RDONLY), "rb") as file:
                # Shared: a check is not an owner.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except OSError:  # it is locked; and a disk without locks must not make a run seem dead
            return True
        return self._lives_elsewhere()

    def _lie_at(self, path: Path) -> None:
        self._cached = None
        self.path = path
        self.name = path.name
        self.spool = path / SPOOL
        self.checkpoints = path / "checkpoints"
        self._reserve = path / ".reserve"
        self._lock_file = path / ".lock"

    def _move_to(self, name: str) -> None:
        """Renames the folder; the lock, which is held, goes with it."""
        target = self.path.with_name(name)
        if target.exists():
            raise StorageError(f"{self.path} cannot be renamed to {name}, which exists: remove one of the two")
        files.rename(self.path, target)
        self._lie_at(target)
        sync(self.path.parent)

    def _lives_elsewhere(self) -> bool:
        """Returns whether its process may be alive on a machine that the lock may not reach."""
        record = self.record()
        return record is not None and record.at_work and record.owner.boot_id != boot_id()
