"""Where the time of a training goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runner.plugin.context import Slots


class Activities:
    """Adds up seconds by activity, between two readings; an activity inside another counts towards itself alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.inner = 0.0
        """Seconds of all slots that are timed."""

    def add(self, activity: str, seconds: float) -> None:
        """Counts seconds towards an activity."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time inside the ``with`` towards ``activity``."""
        before = time.perf_counter()
        yield
        self.wait()
        self.add(activity, time.perf_counter() - before)

    def time(self, slots: Slots, name: str) -> None:
        """Counts the time in a slot towards an activity of its name."""

        def wrapper(step: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = time.perf_counter()
                output = step(*args, **kwargs)
                seconds = time.perf_counter() - before
                self.inner += seconds
                self.add(name, seconds)
                return output

            return timed

        slots.wrap(name, wrapper)

    def read(self) -> tuple[float, dict[str, float]]:
        """Wall-clock seconds and seconds by activity since the last reading; waits for a GPU."""
        self.wait()
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        seconds, self.seconds = self.seconds, {}
        return elapsed, seconds

    def total(self) -> float:
        """Seconds since this was made."""
        return time.perf_counter() - self.started

    def wait(self) -> None:
        """Lets a GPU finish what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
