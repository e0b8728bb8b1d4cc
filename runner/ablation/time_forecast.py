"""Predicts which variants fit into the budget, by the start-up times of two baselines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

PROCESSES = 5
"""Smallest number of processes, one after the other, in which every variant is measured."""
HEADROOM = 1.2
"""Ratio of a suggested budget to the time that was needed."""
FEWEST_PROCESSES = 3
"""Number of processes if the time is short; the intervals are wider."""


@dataclass(frozen=True)
class Pace:
    """Durations of the measurement of one variant."""

    start_s: float
    """Seconds to start a process that compiles nothing."""
    round_s: float
    """Seconds of a round, including its share of trainings."""
    rounds: int
    """Rounds of a process."""
    processes: int = PROCESSES
    """Processes of a variant."""

    @property
    def rounds_s(self) -> float:
        """Returns the seconds of all rounds of all processes of one variant."""
        return self.processes * self.rounds * self.round_s

    def needed(self, variants: int, side_by_side: int) -> float:
        """Returns the seconds for the given number of variants after the start of
        the first two baselines.

        As many take turns as there is memory for, each time with two baselines.
        """
        # Every group of variants has two baselines. Those of the first group are running already.
        measured = variants + 2 * math.ceil(variants / side_by_side)
        variant_s = self.processes * self.start_s + self.rounds_s
        return measured * variant_s - 2 * self.start_s

    def fitting(self, seconds: float, most: int, side_by_side: int) -> int:
        """Returns the number of variants that fit into the given seconds."""
        counts = range(most, 0, -1)
        fitting = (
            count for count in counts if self.needed(count, side_by_side) <= seconds
        )
        return next(fitting, 0)

    def rest(self, again_s: float, measured: int) -> float:
        """Returns the seconds from the start of the first processes, if
        restarting all of them takes ``again_s``.
        """
        return (self.processes - 1) * again_s + measured * self.rounds_s


def order(names: Sequence[str], number: int) -> list[str]:
    """Returns a random order for one round, so that load with the period of a
    round favours no variant.
    """
    return random.Random(number).sample(names, len(names))
