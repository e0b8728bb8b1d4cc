"""Attempts at trials, and how much of a study's budget they used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import psutil
from optuna.trial import FrozenTrial, Trial

from runner.child.spawn import Cause
from runner.study.intervals import Interval, union
from runner.study.leases import Lease

# The attribute of a trial with its attempts.
ATTEMPTS = "runner.attempts"
KILLED = "killed with its worker"
CLOCK_CHANGED = "clock_changed"
"""Key of an attempt during which the system's clock did not run like the monotonic one."""
_CLOCK_TOLERANCE = 1.0
"""Seconds that both clocks may differ by, which the correction of a clock by NTP does not exceed."""


class Attempts:
    """The attempts at one trial, each with ``begin``, ``seed`` (or another step)
    and then ``end`` and ``cause``.

    That of a worker that is gone ended when it was last seen; of one that is ``lost`` no end is kept.
    """

    def __init__(self, trial: Trial, seen: float, lost: Event) -> None:
        self._trial = trial
        self._lost = lost
        self._all: list[dict[str, Any]] = list(trial.user_attrs.get(ATTEMPTS, []))
        if not self._all:
            return

        last_attempt = self._all[-1]
        if "end" not in last_attempt:
            last_attempt |= {"end": max(seen, last_attempt["begin"]), "cause": KILLED}
            trial.set_user_attr(ATTEMPTS, self._all)

    @contextmanager
    def at(self, seed: int | str) -> Iterator[dict[str, Any]]:
        """Records an attempt that lasts as long as the ``with``; its cause is
        STOPPED unless another is set.
        """
        attempt: dict[str, Any] = {"begin": time.time(), "seed": seed}
        started = time.monotonic()
        self._all.append(attempt)
        self._trial.set_user_attr(ATTEMPTS, self._all)
        try:
            yield attempt
        finally:
            end = attempt["begin"] + time.monotonic() - started
            if abs(time.time() - end) > _CLOCK_TOLERANCE:
                attempt[CLOCK_CHANGED] = True
            attempt |= {"end": end, "cause": attempt.get("cause", Cause.STOPPED)}
            if not self._lost.is_set():
                self._trial.set_user_attr(ATTEMPTS, self._all)

    def of(self, seed: int | str, *causes: str) -> list[dict[str, Any]]:
        """Returns the attempts at one training, with one of these causes if any are given."""
        attempts = [attempt for attempt in self._all if attempt["seed"] == seed]
        if not causes:
            return attempts
        return [attempt for attempt in attempts if attempt.get("cause") in causes]


@dataclass(frozen=True)
class Used:
    """The used part of a budget."""

    trials: int
    seconds: float
    device_seconds: float

    @classmethod
    def by(cls, trials: Sequence[FrozenTrial], leases: Sequence[Lease] = ()) -> Used:
        """Returns the used part in all sessions and workers; leases show how long
        unfinished trials were alive.
        """
        last_seen = {lease.trial: lease.seen for lease in leases}
        intervals: list[Interval] = []
        for trial in trials:
            for attempt in trial.user_attrs.get(ATTEMPTS, ()):
                begin = attempt["begin"]
                end = attempt.get("end") or max(begin, last_seen.get(trial.number, 0.0))
                intervals.append((begin, end))
        return cls(
            trials=sum(trial.state.is_finished() for trial in trials),
            seconds=union(intervals),
            device_seconds=sum(end - begin for begin, end in intervals),
        )


def neighbours(own_seconds: float, seconds: float) -> float:
    """Returns the share of this process's processors that others used since the last call of
    ``psutil.cpu_percent``, 0 to 1.
    """
    percents = psutil.cpu_percent(percpu=True)
    cores: Sequence[int] = range(len(percents))
    # Not every system restricts a process to some of the processors.
    if hasattr(psutil.Process, "cpu_affinity"):
        cores = psutil.Process().cpu_affinity() or ()
    loads = [percents[core] / 100 for core in cores if core < len(percents)]
    own_load = own_seconds / max(1e-9, seconds * len(loads))
    return min(1.0, max(0.0, statistics.fmean(loads) - own_load))
