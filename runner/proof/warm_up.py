"""Steps until each takes as long as the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from runner.system.stopwatch import Stopwatch

WINDOW_SECONDS = 0.1
# Times as long as its steps that a window may take with the preparation of these steps.
PREPARING = 5
STEADY = 0.95
WARM_UP_SECONDS = 20.0


@dataclass(frozen=True)
class WarmUp:
    """The steps until every step took as long as the one before.

    Attributes:
        first_s: Wall-clock seconds of the first step alone: compilation, allocation, capture.
        seconds: Time of all steps after the first, until they were steady.
        steps: Number of these steps.
        steady_s: Time of one step in the end.
        steady: Whether steps were steady before the time was over.
    """

    first_s: float
    seconds: float
    steps: int
    steady_s: float
    steady: bool

    @property
    def overhead_s(self) -> float:
        """Returns the seconds in addition to those of as many steady steps."""
        steady_seconds = (self.steps + 1) * self.steady_s
        return max(0.0, self.first_s + self.seconds - steady_seconds)


def warm_up(
    step: Callable[[], object],
    stopwatch: Stopwatch,
    limit_s: float = WARM_UP_SECONDS,
    prepare: Callable[[], object] = lambda: None,
    decide: Callable[[bool], bool] = bool,
) -> WarmUp:
    """Makes steps until they are steady, or for the given seconds by the wall clock.

    Two windows of a tenth of a second in a row are steady if neither is 5 % faster than the best
    one before them.

    Args:
        step: The step.
        stopwatch: Measures its time.
        limit_s: The seconds.
        prepare: Called before each step, and not timed.
        decide: Returns the decision of all processes for that of this one, if several make the
            same steps.
    """
    prepare()
    started = time.perf_counter()
    stopwatch.seconds(step)
    first = time.perf_counter() - started
    windows: list[float] = []
    is_steady = False
    steps = 0
    steps_started = time.perf_counter()
    while decide(not is_steady and time.perf_counter() - steps_started < limit_s):
        count, seconds = _make_window(step, stopwatch, prepare, decide)
        windows.append(seconds / count)
        steps += count
        is_steady = len(windows) > 2 and min(windows[-2:]) > STEADY * min(windows[:-2])
    elapsed = time.perf_counter() - steps_started
    return WarmUp(first, elapsed, steps, windows[-1] if windows else first, is_steady)


def _make_window(
    step: Callable[[], object],
    stopwatch: Stopwatch,
    prepare: Callable[[], object],
    decide: Callable[[bool], bool],
) -> tuple[int, float]:
    """Returns the number of steps in a window, and the seconds of these steps."""
    seconds = 0.0
    count = 0
    is_over = False
    started = time.perf_counter()
    while not is_over:
        prepare()
        seconds += stopwatch.seconds(step)
        count += 1
        # Where preparing takes longer than a step, a window ends with the wall-clock time.
        is_late = time.perf_counter() - started >= PREPARING * WINDOW_SECONDS
        is_over = decide(seconds >= WINDOW_SECONDS or is_late)
    return count, seconds
