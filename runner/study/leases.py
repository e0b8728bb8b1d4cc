"""Leases of trials: which worker has a trial, and whether that worker is alive."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import BigInteger, Engine, String, delete, exc, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from runner.system.processes import Owner

# Time between two heartbeats of a worker.
BEAT_SECONDS = 5.0
# Silence after which a holder on another machine is taken for dead: many heartbeats, because networks stall.
DEAD_SECONDS = 60.0
# Time between two attempts to claim a lease that another worker has.
WAIT_SECONDS = 0.2


class _Base(MappedAsDataclass, DeclarativeBase):
    pass


class Lease(_Base):
    """The worker of a trial: a row, unique by study and trial."""

    __tablename__ = "runner_leases"
    study: Mapped[str] = mapped_column(String(128), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(String(64))
    # Host, boot, process namespace and machine: a ``pid`` is unique only within them.
    place: Mapped[str] = mapped_column(String(256))
    pid: Mapped[int] = mapped_column(BigInteger)
    # Start of the process, which distinguishes it from a later one with the same number.
    born: Mapped[float]
    beats: Mapped[int] = mapped_column(BigInteger)
    seen: Mapped[float]  # last heartbeat, in seconds since 1970 by the worker's clock

    @property
    def owner(self) -> Owner:
        """The process."""
        host, boot_id, namespace, machine = self.place.split(" ")
        return Owner(
            pid=self.pid,
            host=host,
            boot_id=boot_id,
            namespace=namespace,
            born=self.born,
            machine=machine,
        )


class Leases:
    """The leases of one study, for one worker.

    A lease changes hands by one conditional statement, so that only one of several workers that find its holder dead
    gets it; a holder that was taken for dead learns it from its next beat.
    """

    def __init__(self, engine: Engine, study: str, dead_seconds: float = DEAD_SECONDS) -> None:
        self.worker = uuid.uuid4().hex
        self._engine = engine
        self._study = study
        self._dead_seconds = dead_seconds
        self._watched: dict[tuple[str, int], tuple[int, int, float]] = {}

        # Another worker may create the table at the same time, which the database refuses here.
        with suppress(exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):
            _Base.metadata.create_all(engine)

    def claim(self, trial: int) -> bool:
        """Claims a trial that has no worker, or a dead one; returns False if it belongs to
        another.
        """
        holder = self.holder(trial)
        columns = self._columns_of_this_worker()
        if holder is None:
            row = insert(Lease).values(
                study=self._study,
                trial=trial,
                **columns,
            )
            try:
                self._execute(row)
            except exc.IntegrityError:
                return False
            # The count of rows is not checked: not every database counts what is inserted.
            return True

        if self.alive(holder) is not False:
            return False
        is_unchanged = (Lease.worker == holder.worker) & (Lease.beats == holder.beats)
        takeover = update(Lease).where(self._row(trial), is_unchanged)
        return self._execute(takeover.values(**columns))

    @contextmanager
    def waiting(self, trial: int) -> Iterator[None]:
        """Holds a lease for a moment, after any other holder has released it."""
        while not self.claim(trial):
            time.sleep(WAIT_SECONDS)
        try:
            yield
        finally:
            self.release(trial)

    def beat(self, trial: int) -> bool:
        """Writes a heartbeat of this worker; returns False if the trial belongs to another one
        now.
        """
        heartbeat = update(Lease).where(self._row(trial), Lease.worker == self.worker)
        return self._execute(heartbeat.values(beats=Lease.beats + 1, seen=time.time()))

    def release(self, trial: int) -> None:
        """Gives a trial up."""
        self._execute(delete(Lease).where(self._row(trial), Lease.worker == self.worker))

    def clear(self) -> None:
        """Deletes all leases of the study."""
        self._execute(delete(Lease).where(Lease.study == self._study))

    def holder(self, trial: int) -> Lease | None:
        """Returns the lease of a trial; None if it has none."""
        return next((lease for lease in self.all() if lease.trial == trial), None)

    def all(self) -> list[Lease]:
        """The leases of the study."""
        with Session(self._engine) as session:
            rows = session.scalars(select(Lease).where(Lease.study == self._study))
            return list(rows)

    def alive(self, lease: Lease) -> bool | None:
        """Returns whether the holder is alive; None for one on another machine without an observed
        heartbeat, until it was silent for too long.

        Silence is measured by this clock: two clocks need not agree.
        """
        is_alive = lease.owner.alive
        if is_alive is not None:
            return is_alive

        now = time.monotonic()
        key = (lease.worker, lease.trial)
        first_beats, last_beats, last_change = self._watched.get(key, (lease.beats, lease.beats, now))
        if lease.beats != last_beats:
            last_change = now
        self._watched[key] = (first_beats, lease.beats, last_change)

        if now - last_change > self._dead_seconds:
            return False
        return True if lease.beats != first_beats else None

    def _columns_of_this_worker(self) -> dict[str, Any]:
        process = Owner.this_process()
        return {
            "worker": self.worker,
            "place": " ".join((process.host, process.boot_id, process.namespace, process.machine)),
            "pid": process.pid,
            "born": process.born,
            "beats": 0,
            "seen": time.time(),
        }

    def _row(self, trial: int) -> Any:
        return (Lease.study == self._study) & (Lease.trial == trial)

    def _execute(self, statement: Any) -> bool:
        """Returns whether an update has changed one row."""
        with self._engine.begin() as connection:
            result = connection.execute(statement)
            return int(result.rowcount) == 1
