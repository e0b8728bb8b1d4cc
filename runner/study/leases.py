"""Who works on which trial: one row a trial in the study's database, which only its holder keeps fresh."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Engine, Float, Integer, MetaData, String, Table, create_engine, exc, select
from sqlalchemy import delete as sql_delete
from sqlalchemy import insert as sql_insert
from sqlalchemy import update as sql_update

from runner.system.processes import Owner

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

    @property
    def owner(self) -> Owner:
        """The process."""
        host, boot, namespace = self.place.split(" ")
        return Owner(pid=self.pid, host=host, boot_id=boot, namespace=namespace, born=self.born)


@dataclass
class _Watched:
    first: int
    """Beats when it was first seen."""
    beats: int
    since: float
    """When they last changed, by the own clock."""


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
        self._watched: dict[tuple[str, int], _Watched] = {}

    def claim(self, trial: int) -> bool:
        """Takes a trial that nobody holds, or whose holder is dead; false if it belongs to another."""
        holder = self.holder(trial)
        own = Owner.this_process()
        place = f"{own.host} {own.boot_id} {own.namespace}"
        mine = {"worker": self.worker, "place": place, "pid": own.pid, "born": own.born, "beats": 0,
                "seen": time.time()}  # fmt: skip
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

    def living(self) -> list[Lease]:
        """The leases whose holders live; one elsewhere is watched until it beats, or has been silent for too long."""
        while True:
            alive = [lease for lease in self.all() if not self.is_dead(lease)]
            known = [lease for lease in alive if self.is_alive(lease)]
            if known or not alive:
                return known
            time.sleep(_WAIT_SECONDS)

    def clear(self) -> None:
        """Forgets all leases of the study."""
        with self._engine.begin() as connection:
            connection.execute(sql_delete(_TABLE).where(_TABLE.c.study == self._study))

    def is_dead(self, lease: Lease) -> bool:
        """Whether the process that holds a lease cannot come back to it."""
        alive = lease.owner.alive(lease.seen)
        return time.monotonic() - self._watch(lease).since > self._dead_seconds if alive is None else not alive

    def is_alive(self, lease: Lease) -> bool:
        """Whether its holder is known to live; one elsewhere may be neither dead nor alive for all that is known."""
        if lease.owner.here:
            return not self.is_dead(lease)
        watched = self._watch(lease)
        return watched.beats != watched.first and not self.is_dead(lease)

    def _watch(self, lease: Lease) -> _Watched:
        """What is seen to change, because the clocks of two machines need not agree."""
        key, now = (lease.worker, lease.trial), time.monotonic()
        watched = self._watched.setdefault(key, _Watched(lease.beats, lease.beats, now))
        if watched.beats != lease.beats:
            watched.beats, watched.since = lease.beats, now
        return watched

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    def _update(self, trial: int, condition: object, **values: object) -> bool:
        this = (_TABLE.c.study == self._study) & (_TABLE.c.trial == trial) & condition
        with self._engine.begin() as connection:
            return int(connection.execute(sql_update(_TABLE).where(this).values(**values)).rowcount) == 1


def connect_args(url: str) -> dict[str, int]:
    """How long to wait for a database, in seconds: for the lock of a file, or for a server's answer."""
    if url.startswith("sqlite"):
        return {"timeout": 60}
    return {"connect_timeout": 20} if url.startswith(("postgresql", "mysql")) else {}


def _open(url: str) -> Engine:
    engine = create_engine(url, connect_args=connect_args(url))
    with suppress(exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):  # another worker made it just now
        _METADATA.create_all(engine)
    return engine
