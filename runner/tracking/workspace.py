"""The workspace with all runs, and the folder of each run with its record."""

import fcntl
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout
from pydantic import ValidationError

from runner.system import files
from runner.system.errors import StorageError, UsageError
from runner.system.faults import reach
from runner.system.files import is_link, open_file, read_regular, sync, write_durably
from runner.system.places import LOCK_NAME, RECORD, VARIABLE, sqlite_uri, workspace_root
from runner.system.processes import boot_id
from runner.system.secrets import REFUSED_NAME, has_secret, redact_values
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
_SHOWN_RUNS = 8
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
        self.runs, self.ablations, self.studies, self.seeds = self.places = (
            self.root / "runs", self.root / "ablations", self.root / "studies", self.root / "seeds"
        )  # fmt: skip
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
        for what, text in ((f"the path of the workspace ({VARIABLE})", str(runs)), ("the name of the recipe", name)):
            if has_secret(text):
                raise UsageError(f"{what} {REFUSED_NAME}")
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
            return "it is finished"
        may_be_gone = self._lives_elsewhere() and (takeover or record.is_stale)
        if self.alive() and not may_be_gone:
            return f"process {record.owner.pid} on {record.owner.host} is training it"
        return "" if (self.path / LOCK_NAME).exists() else "it ended before its lock was written"

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
        named = {key: values[key] for key in ("name", "run_id", "group", "owner", "digest", "digests")}
        text = json.dumps(redact_values(values) | named, indent=1, ensure_ascii=False)
        write_durably(self.path / RECORD, text + "\n")

    def take_name(self, record: Record, run_id: str) -> Record:
        """Gives the folder, which is claimed, its name for good, which ends with the beginning of MLflow's id.

        Returns the new record; the next ``claim`` completes an interrupted renaming.
        """
        name = f"{folder_name(record.recipe)}-{run_id[:DIGITS]}"
        named = record.model_copy(update={"name": name, "run_id": run_id})
        self.write(named)
        reach("start.named")
        self._move_to(name)
        return named

    def reserve(self) -> None:
        """Takes the space in which the end of the run can be written when the disk is full."""
        with open(open_file(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(os.urandom(_RESERVE_BYTES))  # zeros would take no space on some disks

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
        heard = f"{age:,.0f} s ago" if age >= 0 else f"{-age:,.0f} s in the future"
        refusal = f"{self.name} may be in use by {owner}, whose last sign of life is {heard}"
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
        self._lock = FileLock(self._lock_file, thread_local=False)  # where the folder is now

    def alive(self) -> bool:
        """Returns whether a process is training this run now, for any number of callers."""
        if self._lock.is_locked:
            return True
        record = self.record()
        if record is not None and record.owner.alive is False:
            return False  # the holder of the lock finishes the run of a dead process
        try:
            with open(open_file(self._lock_file, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: a check is not an owner
        except FileNotFoundError:
            pass
        except OSError:  # it is locked; and a disk without locks must not make a run seem dead
            return True
        return self._lives_elsewhere()

    def _lie_at(self, path: Path) -> None:
        self._cached = None
        self.path, self.name = path, path.name
        self.spool, self.checkpoints = path / SPOOL, path / "checkpoints"
        self._reserve, self._lock_file = path / ".reserve", path / ".lock"

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


def folders(*places: Path) -> list[RunFolder]:
    """Returns all runs in these folders of a workspace, the newest first."""
    found = [RunFolder(path) for place in places for path in _with_records(place)]
    started = {folder.name: record.started if (record := folder.record()) else 0.0 for folder in found}
    return sorted(found, key=lambda folder: (started[folder.name], folder.name), reverse=True)


def _with_records(place: Path) -> Iterator[Path]:
    """Yields the folders in a place of a workspace that have a record; links are not followed."""
    if is_link(place):
        _warn_of_link(place)
        return
    try:
        entries = list(os.scandir(place))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        path = place / entry.name
        if entry.is_symlink():
            _warn_of_link(path)
        elif os.path.lexists(path / RECORD):
            yield path


@cache
def _warn_of_link(path: Path) -> None:
    """Warns once of a link in a workspace."""
    hint = f"to keep runs on another disk, name a workspace there in {VARIABLE}"
    _log.warning("%s is a symbolic link, which is not followed: move its target there; %s", path, hint)


def computing(workspace: Workspace) -> int:
    """Number of other processes on this machine that compute a run, an ablation or a study."""
    count = 0
    for place in (workspace.runs, workspace.ablations, workspace.studies):
        for path in _recent(place):
            record = RunFolder(path.parent).record()
            if record is not None and record.owner.here and record.owner.pid != os.getpid():
                count += record.at_work
    return count


def _recent(place: Path) -> Iterator[Path]:
    """Yields records in folders of a place that may belong to a living process."""
    for folder in _with_records(place):
        path = folder / RECORD
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < STALE_SECONDS:
                yield path


def below(workspace: Workspace, group: str) -> list[RunFolder]:
    """The runs of a group of seeds, the newest first."""
    return [each for each in folders(workspace.runs) if (record := each.record()) and record.group == group]


def find(runs: Path, reference: str, *places: Path) -> RunFolder:
    """The run of a workspace that a person means, as ``pick`` understands it; or what lies in other places of it."""
    found = folders(runs, *places)
    names = [(folder.name, record.run_id if (record := folder.record()) else None) for folder in found]
    return found[pick(reference, names, str(runs))]


def pick(reference: str, runs: Sequence[tuple[str, str | None]], where: str) -> int:
    """Returns the index of the run that a reference selects; the runs are pairs of name and
    MLflow's id, the newest first.

    The reference is a name, the digits at its end, an id, the beginning of any of them, or ``latest``. A ``UsageError``
    if no run fits, or several do.
    """
    if not runs:
        raise UsageError(f"no runs yet in {where}; start one: runner run marl_phase2")
    if reference == "latest":
        return 0
    fitting = [number for number, run in enumerate(runs) if reference in run]
    if reference and not fitting:
        beginnings = [(name, name.rpartition("-")[2], run_id or name) for name, run_id in runs]
        fitting = [n for n, each in enumerate(beginnings) if any(part.startswith(reference) for part in each)]
    if len(fitting) == 1:
        return fitting[0]
    names = [runs[number][0] for number in fitting or range(len(runs))]
    shown = ", ".join(names[:_SHOWN_RUNS]) + (", ..." if len(names) > _SHOWN_RUNS else "")
    if fitting:
        raise UsageError(f"'{reference}' matches {len(fitting)} runs: {shown}")
    raise UsageError(f"no run '{reference}' in {where}; there are: {shown}")


def folder_of(run: Path | str) -> RunFolder:
    """The folder of a run: the path of one, or what ``find`` understands in this workspace."""
    path = Path(run).resolve()
    return RunFolder(path) if (path / LOCK_NAME).exists() else find(Workspace().runs, str(run))
