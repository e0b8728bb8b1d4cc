"""Steps until each takes as long as the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from runner.system.stopwatch import Stopwatch

WINDOW_SECONDS = 0.1
PREPARING = 5  # times as long as its steps a window of the warm-up may take with what is prepared for them
STEADY = 0.95
WARM_UP_SECONDS = 20.0


@dataclass(frozen=True)
class WarmUp:
    """The steps until every step took as long as the one before."""

    first_s: float  # wall-clock seconds of the first step alone: compilation, allocation, capture
    seconds: float  # of all steps after the first until it was steady
    steps: int
    steady_s: float  # of one step in the end
    steady: bool  # whether it was steady before the time was over

    @property
    def overhead_s(self) -> float:
        """Seconds spent beyond what as many steady steps take."""
        return max(0.0, self.first_s + self.seconds - (self.steps + 1) * self.steady_s)


def warm_up(
    step: Callable[[], object],
    stopwatch: Stopwatch,
    limit_s: float = WARM_UP_SECONDS,
    prepare: Callable[[], object] = lambda: None,
) -> WarmUp:
    """Makes steps until they are steady, or for the given seconds by the wall clock.

    Two windows of a tenth of a second in a row are steady if neither is 5 % faster than the best one before them.
    ``prepare`` is called before each step and is not timed.
    """
    prepare()
    started = time.perf_counter()
    stopwatch.seconds(step)
    first = time.perf_counter() - started
    windows: list[float] = []
    steady, steps, begun = False, 0, time.perf_counter()
    while not steady and time.perf_counter() - begun < limit_s:
        spent, count = 0.0, 0
        begun_window = time.perf_counter()
        # Where preparing takes longer than a step, a window ends with the wall-clock time.
        while spent < WINDOW_SECONDS and (not count or time.perf_counter() - begun_window < PREPARING * WINDOW_SECONDS):
            prepare()
            spent, count = spent + stopwatch.seconds(step), count + 1
        windows.append(spent / count)
        steps += count
        steady = len(windows) > 2 and min(windows[-2:]) > STEADY * min(windows[:-2])
    return WarmUp(first, time.perf_counter() - begun, steps, windows[-1] if windows else first, steady)
