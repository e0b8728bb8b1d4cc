"""Where the time of a training goes."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from runner.plugin.context import Slots


class Activities:
    """Adds up seconds by activity, between two readings; an activity inside another counts towards itself alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started = self.last = perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.inner = 0.0
        """Seconds of all slots that are timed."""

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Counts the time inside the ``with`` towards ``activity``."""
        before = perf_counter()
        yield
        self.wait()
        self.seconds[activity] += perf_counter() - before

    def time(self, slots: Slots, name: str) -> None:
        """Counts the time in a slot towards an activity of its name."""

        def wrapper(step: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = perf_counter()
                output = step(*args, **kwargs)
                seconds = perf_counter() - before
                self.inner += seconds
                self.seconds[name] += seconds
                return output

            return timed

        slots.wrap(name, wrapper)

    def read(self) -> tuple[float, Mapping[str, float]]:
        """Wall-clock seconds and seconds by activity (0 for others) since the last reading; waits for a GPU."""
        self.wait()
        now = perf_counter()
        elapsed, self.last = now - self.last, now
        seconds, self.seconds = self.seconds, defaultdict(float)
        return elapsed, seconds

    def total(self) -> float:
        """Seconds since this was made."""
        return perf_counter() - self.started

    def wait(self) -> None:
        """Lets a GPU finish what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
