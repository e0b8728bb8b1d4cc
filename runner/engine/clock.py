"""Where the time of a training goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up seconds by activity, between two readings.

    On a GPU the work is waited for where an activity ends, which happens once per burst of updates.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = time.perf_counter()
        self.last = self.started
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time inside the ``with`` towards ``activity``."""
        before = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - before

    def read(self) -> tuple[float, dict[str, float]]:
        """Wall-clock seconds and seconds by activity since the last reading."""
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        seconds, self.seconds = self.seconds, {}
        return elapsed, seconds

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self.started
