"""Who works on which trial: one row a trial in the study's database, which only its holder keeps fresh."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, String, delete, exc, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

from runner.system.processes import Owner

if TYPE_CHECKING:
    from sqlalchemy import Engine

BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0  # without a beat after which a holder on another machine is taken for dead
_WAIT_SECONDS = 0.2


class _Base(MappedAsDataclass, DeclarativeBase):
    pass


class Lease(_Base):
    """Who holds a trial: a row, unique by study and trial."""

    __tablename__ = "runner_leases"
    study: Mapped[str] = mapped_column(String(128), primary_key=True)
    trial: Mapped[int] = mapped_column(primary_key=True)
    worker: Mapped[str] = mapped_column(String(64))
    place: Mapped[str] = mapped_column(String(256))  # machine, boot and process namespace, in which ``pid`` counts
    pid: Mapped[int] = mapped_column(BigInteger)
    born: Mapped[float]  # when the process began, which tells it from a later one with the same number
    beats: Mapped[int] = mapped_column(BigInteger)
    seen: Mapped[float]  # when it was last heard of, in seconds since 1970 by its own clock

    @property
    def owner(self) -> Owner:
        """The process."""
        host, boot, namespace = self.place.split(" ")
        return Owner(pid=self.pid, host=host, boot_id=boot, namespace=namespace, born=self.born)


class Leases:
    """The leases of one study, for one worker.

    A lease changes hands by one conditional statement, so that only one of several workers that find its holder dead
    gets it; a holder that was taken for dead learns it from its next beat.
    """

    def __init__(self, engine: Engine, study: str, dead_seconds: float = DEAD_SECONDS) -> None:
        self.worker = uuid.uuid4().hex
        self._engine, self._study, self._dead_seconds = engine, study, dead_seconds
        self._watched: dict[tuple[str, int], tuple[int, int, float]] = {}
        with suppress(exc.OperationalError, exc.ProgrammingError, exc.IntegrityError):  # another worker made it
            _Base.metadata.create_all(engine)

    def claim(self, trial: int) -> bool:
        """Takes a trial that nobody holds, or whose holder is dead; false if it belongs to another."""
        holder, own = self.holder(trial), Owner.this_process()
        mine = {"worker": self.worker, "place": f"{own.host} {own.boot_id} {own.namespace}", "pid": own.pid,
                "born": own.born, "beats": 0, "seen": time.time()}  # fmt: skip
        if holder is None:
            try:
                self._execute(insert(Lease).values(study=self._study, trial=trial, **mine))
            except exc.IntegrityError:
                return False
            return True  # not every database counts what is inserted
        unchanged = (Lease.worker == holder.worker) & (Lease.beats == holder.beats)
        return self.is_dead(holder) and self._execute(update(Lease).where(self._row(trial), unchanged).values(**mine))

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
        mine = update(Lease).where(self._row(trial), Lease.worker == self.worker)
        return self._execute(mine.values(beats=Lease.beats + 1, seen=time.time()))

    def release(self, trial: int) -> None:
        """Gives a trial up."""
        self._execute(delete(Lease).where(self._row(trial), Lease.worker == self.worker))

    def clear(self) -> None:
        """Forgets all leases of the study."""
        self._execute(delete(Lease).where(Lease.study == self._study))

    def holder(self, trial: int) -> Lease | None:
        """Who holds a trial; None if nobody does."""
        return next((lease for lease in self.all() if lease.trial == trial), None)

    def all(self) -> list[Lease]:
        """The leases of the study."""
        with Session(self._engine) as session:
            return list(session.scalars(select(Lease).where(Lease.study == self._study)))

    def living(self) -> list[Lease]:
        """The leases whose holders live; one elsewhere is watched until it beats, or has been silent for too long."""
        while True:
            alive = [lease for lease in self.all() if not self.is_dead(lease)]
            known = [lease for lease in alive if self.is_alive(lease)]
            if known or not alive:
                return known
            time.sleep(_WAIT_SECONDS)

    def is_dead(self, lease: Lease) -> bool:
        """Whether the process that holds a lease cannot come back to it."""
        alive = lease.owner.alive(lease.seen)
        return self._watch(lease)[1] > self._dead_seconds if alive is None else not alive

    def is_alive(self, lease: Lease) -> bool:
        """Whether its holder is known to live; one elsewhere may be neither dead nor alive for all that is known."""
        has_beaten, _ = self._watch(lease)
        return (lease.owner.here or has_beaten) and not self.is_dead(lease)

    def _watch(self, lease: Lease) -> tuple[bool, float]:
        """Whether a holder has been seen to beat, and for how long not, by this clock: two clocks need not agree."""
        key, now = (lease.worker, lease.trial), time.monotonic()
        first, beats, since = self._watched.get(key, (lease.beats, lease.beats, now))
        if beats != lease.beats:
            since = now
        self._watched[key] = (first, lease.beats, since)
        return lease.beats != first, now - since

    def _row(self, trial: int) -> Any:
        return (Lease.study == self._study) & (Lease.trial == trial)

    def _execute(self, statement: Any) -> bool:
        """Whether it has changed one row, for an update."""
        with self._engine.begin() as connection:
            return int(connection.execute(statement).rowcount) == 1
