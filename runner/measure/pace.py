"""Predicts which variants fit into the budget, by the start-up times of two baselines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# One after the other, that every variant is measured in at least.
PROCESSES = 5
# Of a budget that is suggested, over what was needed this time.
HEADROOM = 1.2
# Where there is not the time for more: intervals are wider then.
FEWEST_PROCESSES = 3


@dataclass(frozen=True)
class Pace:
    """Durations of the measurement of one variant."""

    # Of one process that compiles nothing.
    start_s: float
    # Of one round, including its share of trainings.
    round_s: float
    # Of one process.
    rounds: int
    # Of one variant.
    processes: int = PROCESSES

    @property
    def rounds_s(self) -> float:
        """Returns the seconds of all rounds of all processes of one variant."""
        return self.processes * self.rounds * self.round_s

    def needed(self, variants: int, side_by_side: int) -> float:
        """Returns the seconds for the given number of variants after the start of
        the first two baselines.

        As many take turns as there is memory for, each time with two baselines.
        """
        measured = variants + 2 * math.ceil(variants / side_by_side)
        return (
            measured * (self.processes * self.start_s + self.rounds_s)
            - 2 * self.start_s
        )

    def fitting(self, seconds: float, most: int, side_by_side: int) -> int:
        """Returns the number of variants that fit into the given seconds."""
        return max(
            (
                count
                for count in range(1, most + 1)
                if self.needed(count, side_by_side) <= seconds
            ),
            default=0,
        )

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
