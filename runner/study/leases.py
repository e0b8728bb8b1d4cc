"""Who works on which trial: one row a trial in the study's database, which only its holder keeps fresh."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
from sqlalchemy import BigInteger, Column, Engine, Float, Integer, MetaData, String, Table, create_engine, exc, select
from sqlalchemy import delete as sql_delete
from sqlalchemy import insert as sql_insert
from sqlalchemy import update as sql_update

from runner.hardware import boot_id, host_name

BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0
"""A holder on another machine that has not been heard of for so long is taken for dead."""
_WAIT_SECONDS = 0.2

_METADATA = MetaData()
_TABLE = Table(
    "runner_leases",
    _METADATA,
    Column("study", String(128), primary_key=True),
    Column("trial", Integer, primary_key=True),
    Column("worker", String(64), nullable=False),
    Column("place", String(256), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("born", Float, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("seen", Float, nullable=False),
)


@dataclass(frozen=True)
class Lease:
    """Who holds a trial."""

    trial: int
    worker: str
    place: str
    """Machine, boot and process namespace: where ``pid`` means this process."""
    pid: int
    born: float
    """When the process began, which tells it from a later one with the same number."""
    beats: int
    seen: float
    """When it was last heard of, in seconds since 1970 by its own clock."""


class Leases:
    """The leases of one study, for one worker.

    A lease changes hands by one conditional statement, so that only one of several workers that find its holder dead
    gets it; a holder that was taken for dead learns it from its next beat.

    Args:
        url: the database.
        study: the study's name.
        dead_seconds: without a beat, seen from here, after which a holder elsewhere is dead.
    """

    def __init__(self, url: str, study: str, dead_seconds: float = DEAD_SECONDS) -> None:
        self.worker = uuid.uuid4().hex
        self._engine = _open(url)
        self._study = study
        self._dead_seconds = dead_seconds
        self._first_seen: dict[tuple[str, int], tuple[int, float]] = {}

    def claim(self, trial: int) -> bool:
        """Takes a trial that nobody holds, or whose holder is dead; false if it belongs to another."""
        holder = self.holder(trial)
        mine = {"worker": self.worker, "place": _place(), "pid": os.getpid(), "born": _born(os.getpid()),
                "beats": 0, "seen": time.time()}  # fmt: skip
        if holder is None:
            statement = sql_insert(_TABLE).values(study=self._study, trial=trial, **mine)
            try:
                with self._engine.begin() as connection:
                    connection.execute(statement)
            except exc.IntegrityError:
                return False
            return True
        if not self.is_dead(holder):
            return False
        unchanged = (_TABLE.c.worker == holder.worker) & (_TABLE.c.beats == holder.beats)
        return self._update(trial, unchanged, **mine)

    @contextmanager
    def waiting(self, trial: int) -> Iterator[None]:
        """Holds a lease for a moment, when whoever holds it has given it up."""
        while not self.claim(trial):
            time.sleep(_WAIT_SECONDS)
        try:
            yield
        finally:
            self.release(trial)

    def beat(self, trial: int) -> bool:
        """Says that this worker lives; false if the trial is no longer its own."""
        return self._update(trial, _TABLE.c.worker == self.worker, beats=_TABLE.c.beats + 1, seen=time.time())

    def release(self, trial: int) -> None:
        """Gives a trial up."""
        mine = (_TABLE.c.study == self._study) & (_TABLE.c.trial == trial) & (_TABLE.c.worker == self.worker)
        with self._engine.begin() as connection:
            connection.execute(sql_delete(_TABLE).where(mine))

    def holder(self, trial: int) -> Lease | None:
        """Who holds a trial; None if nobody does."""
        return next((lease for lease in self.all() if lease.trial == trial), None)

    def all(self) -> list[Lease]:
        """The leases of the study."""
        columns = [_TABLE.c[name] for name in Lease.__dataclass_fields__]
        with self._engine.connect() as connection:
            rows = connection.execute(select(*columns).where(_TABLE.c.study == self._study)).all()
        return [Lease(*row) for row in rows]

    def clear(self) -> None:
        """Forgets all leases of the study."""
        with self._engine.begin() as connection:
            connection.execute(sql_delete(_TABLE).where(_TABLE.c.study == self._study))

    def is_dead(self, lease: Lease) -> bool:
        """Whether the process that holds a lease cannot come back to it."""
        if lease.place == _place():
            return abs(_born(lease.pid) - lease.born) > 1.0
        key, now = (lease.worker, lease.trial), time.monotonic()
        beats, since = self._first_seen.get(key, (-1, now))
        if beats != lease.beats:  # by what is seen to change, because the clocks of two machines need not agree
            self._first_seen[key] = (lease.beats, now)
            return False
        return now - since > self._dead_seconds

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    def _update(self, trial: int, condition: object, **values: object) -> bool:
        this = (_TABLE.c.study == self._study) & (_TABLE.c.trial == trial) & condition
        with self._engine.begin() as connection:
            return int(connection.execute(sql_update(_TABLE).where(this).values(**values)).rowcount) == 1


def _open(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 60} if url.startswith("sqlite") else {})
    with suppress(exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):  # another worker made it just now
        _METADATA.create_all(engine)
    return engine


def _place() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{host_name()} {boot_id()} {namespace}"


def _born(pid: int) -> float:
    """When a process began; 0 if there is none, or only a dead one that its parent has not asked after."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0
