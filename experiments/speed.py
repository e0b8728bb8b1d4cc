"""The factor by which one function is faster than another."""

from collections.abc import Callable

import torch

from runner.proof import ratio
from runner.proof.ratios import Ratio
from runner.system.stopwatch import Stopwatch

ROUNDS = 21
BLOCK_SECONDS = 0.05
"""Duration of a block of calls, long compared with the resolution of the clock."""
METHOD = f"{ROUNDS} rounds of one process, 95 %"


def speed(baseline: Callable[[], object], changed: Callable[[], object]) -> Ratio:
    """Times two functions alternately and returns the factor by which the second is faster."""
    for function in (baseline, changed):
        for _ in range(5):
            function()
    calls = calls_for(BLOCK_SECONDS, baseline)
    baseline_seconds = []
    changed_seconds = []
    for number in range(ROUNDS):
        # Alternating the order cancels a drift of the machine.
        if number % 2:
            changed_seconds.append(seconds_of(calls, changed))
            baseline_seconds.append(seconds_of(calls, baseline))
        else:
            baseline_seconds.append(seconds_of(calls, baseline))
            changed_seconds.append(seconds_of(calls, changed))
    return ratio(baseline_seconds, changed_seconds)


def calls_for(seconds: float, function: Callable[[], object]) -> int:
    """Returns the number of calls that take that long."""
    return max(1, round(seconds * 3 / seconds_of(3, function)))


def seconds_of(calls: int, function: Callable[[], object]) -> float:
    """Returns the duration of a number of calls."""

    def work() -> None:
        for _ in range(calls):
            function()

    return Stopwatch(torch.device("cpu")).seconds(work)
