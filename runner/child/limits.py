"""What a child process may use, and what it and the processes that it starts do use."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

_COUNT_SECONDS = 2.0
"""Between two looks for processes that a child has started, which costs more than to look at those known."""


@dataclass(frozen=True)
class Limits:
    """What a child may use before it is ended."""

    seconds: float = math.inf
    """Its whole life."""
    silence: float = math.inf
    """Seconds without a word from it."""
    memory: float = math.inf
    """Bytes of host memory of all its processes."""
    grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL when it is told to stop."""


class Family:
    """A process with all that it has started."""

    def __init__(self, pid: int) -> None:
        self._processes: list[psutil.Process] = []
        self._counted = -math.inf
        self.cpu_seconds = 0.0
        """As far as seen."""
        with suppress(psutil.Error):  # it has ended already
            self._processes = [psutil.Process(pid)]

    def memory(self) -> int:
        """Bytes of host memory that all of them hold now."""
        if self._processes and time.monotonic() - self._counted > _COUNT_SECONDS:
            self._counted = time.monotonic()
            with suppress(psutil.Error):
                self._processes[1:] = self._processes[0].children(recursive=True)
        memory, cpu = 0, 0.0
        for each in self._processes:
            with suppress(psutil.Error):
                memory += each.memory_info().rss
                times = each.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
        self.cpu_seconds = max(self.cpu_seconds, cpu)
        return memory
