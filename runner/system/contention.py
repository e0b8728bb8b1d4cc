"""Measures the processor time that other programs take from this process."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

WAITED_SHARE = 0.1
OTHER_CORES = 0.2
OTHER_CORES_PER_CORE = 0.01
"""Above these, the processor counts as shared; a system by itself computes less than that."""
_BUSY_SHARE = 0.2
"""Smallest share of the time for which a thread must compute or wait to be a sample of the load."""
_SLICE_SECONDS = 0.003
"""About how long a thread waits that lost its core to another program."""
_NANOSECOND = 1e-9


class Contention(NamedTuple):
    """The load of other programs during some time, as measured by this process.

    Attributes:
        waited: Largest share of its time that a busy thread of this process waited for a core.
        other_cores: Cores that other processes used, on average.
    """

    waited: float
    other_cores: float

    def is_high(self, cores: int) -> bool:
        """Returns whether threads that spin delay each other.

        Both numbers have to be large: on a quiet machine threads of one process wait for each
        other too, and where cores are free the others may use as many as they like.
        """
        needed = OTHER_CORES + OTHER_CORES_PER_CORE * cores
        return self.waited > WAITED_SHARE and self.other_cores > needed


class _Times(NamedTuple):
    """Clocks of the machine and of this process, in seconds."""

    wall: float
    process: float  # that this process has computed
    machine: float | None  # that all processes have computed, if the system counts that
    threads: dict[str, tuple[float, float]]  # computed and waited for a core, by thread


class ContentionMeter:
    """Measures contention from one reading to the next."""

    def __init__(self) -> None:
        self._last = _times()

    def read(self) -> Contention:
        """Returns the contention since the last call, or since this meter was made."""
        last = self._last
        times = self._last = _times()
        seconds = max(times.wall - last.wall, 1e-3)
        shares = [
            waited / (computed + waited)
            for computed, waited in _thread_changes(last, times)
            if computed + waited > _BUSY_SHARE * seconds
        ]
        return Contention(max(shares, default=0.0), _other_cores(last, times, seconds))


def _other_cores(last: _Times, times: _Times, seconds: float) -> float:
    """Returns the cores that other processes used; inf if unknown, so that waiting alone decides."""
    if last.machine is None or times.machine is None:
        return math.inf
    computed = times.machine - last.machine
    computed_here = times.process - last.process
    return max(0.0, (computed - computed_here) / seconds)


def _thread_changes(last: _Times, times: _Times) -> Iterator[tuple[float, float]]:
    for thread, (computed, waited) in times.threads.items():
        computed_before, waited_before = last.threads.get(thread, (0.0, 0.0))
        yield computed - computed_before, waited - waited_before


def _times() -> _Times:
    return _Times(time.monotonic(), time.process_time(), _machine_seconds(), _thread_seconds())


def _machine_seconds() -> float | None:
    """Seconds that all cores have computed: for programs, the kernel and other virtual machines."""
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    except OSError:  # not Linux
        return None
    user, nice, system, _idle, _iowait, interrupts, soft_interrupts, stolen = map(int, fields[:8])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def _thread_seconds() -> dict[str, tuple[float, float]]:
    """Seconds that threads of this process have computed and waited for a core, by thread.

    Without the statistics of the kernel's scheduler, the process counts as one thread, and its
    involuntary switches represent the time it waited.
    """
    seconds = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread has just ended
            computed, waited, _slices = map(int, file.read_bytes().split())
            seconds[file.parent.name] = (computed * _NANOSECOND, waited * _NANOSECOND)
    if not seconds:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds["process"] = (usage.ru_utime + usage.ru_stime, usage.ru_nivcsw * _SLICE_SECONDS)
    return seconds


SINCE_START = ContentionMeter()
"""The meter of this process; it is imported early, so that it has measured for a while
when a training starts.
"""
