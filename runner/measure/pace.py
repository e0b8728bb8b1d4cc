"""Predicts which variants fit into the budget, by the start-up times of two baselines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

PROCESSES = 5  # one after the other, that every variant is measured in at least
HEADROOM = 1.2  # of a budget that is suggested, over what was needed this time
FEWEST_PROCESSES = 3  # where there is not the time for more: intervals are wider then


@dataclass(frozen=True)
class Pace:
    """How long it takes to measure one of those that take turns."""

    start_s: float  # of one process that compiles nothing
    round_s: float  # of one round, with its part of those that train
    rounds: int  # of one process
    processes: int = PROCESSES  # of one variant

    @property
    def rounds_s(self) -> float:
        """Of all rounds of all processes of one of them."""
        return self.processes * self.rounds * self.round_s

    def needed(self, variants: int, side_by_side: int) -> float:
        """Seconds for so many variants, once the first two baselines have been started.

        As many take turns as there is memory for, each time with two baselines.
        """
        measured = variants + 2 * math.ceil(variants / side_by_side)
        return measured * (self.processes * self.start_s + self.rounds_s) - 2 * self.start_s

    def fitting(self, seconds: float, most: int, side_by_side: int) -> int:
        """How many variants that is the time for."""
        return max((count for count in range(1, most + 1) if self.needed(count, side_by_side) <= seconds), default=0)

    def rest(self, again_s: float, measured: int) -> float:
        """Seconds from when so many have their first process, and all next ones take so long to start once."""
        return (self.processes - 1) * again_s + measured * self.rounds_s


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of one round, by chance: load that comes back as often as a round does favours none of them."""
    return random.Random(number).sample(names, len(names))
