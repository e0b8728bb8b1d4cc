"""Ratios of times, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import truediv

import torch

from runner.system.interval import CONFIDENCE, student

# With four, an interval of 95 % contains the truth in 89 % of cases; with five, in 94 %.
FEWEST_ROUNDS = 5
RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A ratio of times: above 1 is faster.

    Attributes:
        value: The median over rounds; the geometric mean over several processes.
        low: Lower end of the 95 % interval: over the rounds of one process, or over several
            processes.
        high: Upper end of this interval.
        rounds: Number of rounds.
        processes: Number of processes, or of pairs of processes.
    """

    value: float
    low: float
    high: float
    rounds: int
    processes: int = 1

    @property
    def spread(self) -> float:
        """Returns the factor by which the interval reaches away from 1, on its farther side; 1 if
        it is the point 1.
        """
        return max(self.high, 1 / self.low)

    @property
    def half_width(self) -> float:
        """Returns half the interval's width, relative to its middle."""
        return math.sqrt(self.high / self.low) - 1

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "no ratio"
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


NO_RATIO = Ratio(math.nan, math.nan, math.nan, 0)
"""Represents the ratio of two that do not do the same work."""


def ratio(
    baseline_seconds: Sequence[float], changed_seconds: Sequence[float], seed: int = 0
) -> Ratio:
    """Returns the ratio of two times that were measured in pairs, one pair per round; raises a
    ``ValueError`` for other times.

    It does not check the timed work: compare the final states of both, as ``clock`` does, or one
    that skips its work counts as faster. The interval is over rounds: it is valid for the two
    processes, or objects, that were timed. Others that do the same may be faster or slower for
    their entire lifetime.
    """
    if len(baseline_seconds) != len(changed_seconds) or not baseline_seconds:
        counts = f"{len(baseline_seconds)} and {len(changed_seconds)}"
        raise ValueError(f"{counts} rounds are not pairs")
    times = (*baseline_seconds, *changed_seconds)
    if not all(0 < seconds < math.inf for seconds in times):
        raise ValueError("every time must be a positive number of seconds")
    return of_rounds(list(map(truediv, baseline_seconds, changed_seconds)), seed)


def of_rounds(ratios: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of ratios, one a round, with its percentile bootstrap interval (Efron
    and Tibshirani 1993).

    Medians and intervals are computed on logarithms, so that a ratio and its inverse
    are equivalent.
    """
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(seed)
    shape = (RESAMPLES, len(logs))
    picks = torch.randint(len(logs), shape, generator=generator)
    medians = logs[picks].quantile(0.5, dim=1)
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    ends = medians.quantile(torch.tensor(tails, dtype=torch.float64))
    low, high = ends.exp().tolist()
    return Ratio(logs.quantile(0.5).exp().item(), low, high, len(logs))


def of_processes(ratios: Sequence[float], rounds: int) -> Ratio:
    """Returns the geometric mean over processes, with Student's t interval (1908).

    Two identical processes differ in speed for their entire lifetime, depending on their memory
    addresses. Rounds do not show this luck, so a process counts once, however many rounds it has.
    For few values a percentile bootstrap is too narrow; Student's interval has its nominal coverage
    if luck is normal. Computed on logarithms, as in ``of_rounds``.

    Args:
        ratios: One of each process, or of each pair of processes; two at least.
        rounds: Number of rounds of all processes.
    """
    logs = [math.log(value) for value in ratios]
    middle, low, high = map(math.exp, student(logs))
    return Ratio(middle, low, high, rounds, len(ratios))


class Effect(StrEnum):
    """The conclusion of a measurement."""

    FASTER = "faster"
    SLOWER = "slower"
    UNCLEAR = "unclear"
    # The candidate does not do the baseline's work.
    INVALID = "invalid"


def noise_factor(a_a: Ratio) -> float:
    """Returns the factor up to which a ratio is noise: the band of A/A is from 1 / factor to
    factor.

    A/A is the baseline against itself, on the same machine at the same time. With several
    processes, whose differences are in every interval, the factor is that of A/A's value. With one
    process, no interval contains the differences between processes, so the factor is the farther
    end of A/A's interval.
    """
    return a_a.spread if a_a.processes == 1 else max(a_a.value, 1 / a_a.value)


def effect(of: Ratio, a_a: Ratio) -> Effect:
    """Returns faster or slower if the interval excludes 1 and the ratio is outside of the band of
    A/A; else unclear.

    With fewer than five rounds the effect is unclear.
    """
    if min(of.rounds, a_a.rounds) < FEWEST_ROUNDS or of.low <= 1 <= of.high:
        return Effect.UNCLEAR
    if max(of.value, 1 / of.value) <= noise_factor(a_a):
        return Effect.UNCLEAR
    return Effect.FASTER if of.value > 1 else Effect.SLOWER
