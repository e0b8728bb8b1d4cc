"""Mode in which the OpenMP threads of this process wait for each other, which can
change during a computation.

Between two parallel regions a thread of GNU's OpenMP, which torch's wheels contain, waits in a
loop for some milliseconds before it sleeps. On a core that another program needs, that loop delays
the very thread it waits for. The runtime shortens the loop to a hundred turns while it manages more
threads than there are cores (its manual, under ``GOMP_SPINCOUNT``). A second team of threads that
has nothing to do is enough for that. Parallel regions keep their number of threads, so every digit
stays the same.
"""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path

_LIBRARY = re.compile(r"(/\S*libgomp\S*)$", re.MULTILINE)


class WaitControl:
    """Switches all OpenMP runtimes of this process between waiting in a loop and sleeping."""

    def __init__(self) -> None:
        self._teams: dict[str, _IdleTeam] = {}

    @property
    def sleeps(self) -> bool:
        """Returns whether waiting threads sleep."""
        return bool(self._teams)

    def sleep(self) -> bool:
        """Makes waiting threads sleep, also those of a runtime that was loaded since the last call.

        Returns:
            False if this process has no runtime that can be switched.
        """
        for library in sorted(_libraries() - self._teams.keys()):
            self._teams[library] = _IdleTeam(library)
        return self.sleeps

    def spin(self) -> None:
        """Makes waiting threads spin for a while, as they do by default."""
        for team in self._teams.values():
            team.end()
        self._teams.clear()


class _IdleTeam:
    """A team of threads that sleeps until it ends, with one thread more than there are cores."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._is_started = threading.Event()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="runner-idle-team", daemon=True)
        self._thread.start()
        self._is_started.wait()

    def end(self) -> None:
        """Ends all threads of the team."""
        self._is_ended.set()
        self._thread.join()

    def _hold(self) -> None:
        """Leads the team, which lives as long as this thread does."""
        try:
            runtime = ctypes.CDLL(self._library)
            threads = ctypes.c_uint(runtime.omp_get_num_procs() + 1)
            # Every thread calls free(NULL), which does nothing and needs no lock of the interpreter.
            region = ctypes.CDLL(None).free
            runtime.GOMP_parallel(region, None, threads, ctypes.c_uint(0))
        finally:
            self._is_started.set()
        self._is_ended.wait()


def _libraries() -> set[str]:
    """Paths of the GNU runtimes that are loaded; a compiler may add one to torch's."""
    try:
        return set(_LIBRARY.findall(Path("/proc/self/maps").read_text()))
    except OSError:  # not Linux
        return set()
