"""How sure a measurement is: ratios of times with intervals, and a sequential test for "not worse"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import truediv
from statistics import fmean, stdev
from typing import Any

import torch

from runner.compare.verdict import Outcome

FEWEST_ROUNDS = 5  # with four, an interval of 95 % holds the truth in 89 % of cases; with five, in 94 %
RESAMPLES = 4000
CONFIDENCE = 0.95
PATHS = 200_000  # simulated experiments, from which boundaries are taken: the error of a rate of 5 % is then 0.05 %


@dataclass(frozen=True)
class Ratio:
    """How many times as fast: above 1 is faster."""

    value: float  # the median over rounds
    low: float  # lower end of the 95 % bootstrap interval of the median
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """By which factor the interval reaches away from 1, on its farther side; 1 if it is the point 1."""
        return max(self.high, 1 / self.low)

    @property
    def half_width(self) -> float:
        """Half the interval's width, relative to its middle."""
        return math.sqrt(self.high / self.low) - 1

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(baseline_seconds: Sequence[float], changed_seconds: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of two times that were measured in pairs, a pair a round; ``ValueError`` if they are no such times."""
    if len(baseline_seconds) != len(changed_seconds) or not baseline_seconds:
        raise ValueError(f"{len(baseline_seconds)} and {len(changed_seconds)} rounds are no pairs")
    if not all(0 < seconds < math.inf for seconds in (*baseline_seconds, *changed_seconds)):
        raise ValueError("every time must be a positive number of seconds")
    return of_ratios(list(map(truediv, baseline_seconds, changed_seconds)), seed)


def of_ratios(ratios: Sequence[float], seed: int = 0) -> Ratio:
    """The median of ratios, one a round, with its percentile bootstrap interval (Efron and Tibshirani 1993).

    Medians and intervals are taken of logarithms, so that a ratio and its inverse say the same.
    """
    logs = torch.tensor(ratios, dtype=torch.float64).log()
    draw = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(logs), (RESAMPLES, len(logs)), generator=draw)
    medians = logs[picks].quantile(0.5, dim=1)
    tails = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    low, high = medians.quantile(tails).exp().tolist()
    return Ratio(logs.quantile(0.5).exp().item(), low, high, len(logs))


class Effect(StrEnum):
    """What a measurement allows to say."""

    FASTER = "faster"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"


def effect(of: Ratio, a_a: Ratio) -> Effect:
    """Faster or slower, if the interval says so and the effect is larger than what A/A reaches; else inconclusive.

    With fewer than five rounds the bootstrap's interval is too narrow to say anything. A/A is the baseline against
    itself, on the same machine at the same time.
    """
    few = min(of.rounds, a_a.rounds) < FEWEST_ROUNDS
    if few or of.low <= 1 <= of.high or max(of.value, 1 / of.value) <= a_a.spread:
        return Effect.INCONCLUSIVE
    return Effect.FASTER if of.value > 1 else Effect.SLOWER


@dataclass(frozen=True)
class Design:
    """A plan for a sequential test, made before its first pair."""

    bounds: Mapping[int, float]  # what the t statistic has to exceed, by the number of pairs after which it looks
    allowed_deviation: float  # of a pair's difference, as a multiple of the margin, up to which the power is reached


@lru_cache
def design(looks: tuple[int, ...], alpha: float, power: float) -> Design:
    """Boundaries that spend ``alpha`` over the looks, and the noise at which ``power`` is reached.

    Alpha spending (Lan and DeMets 1983) with their Pocock-like function, ``alpha ln(1 + (e - 1) n / n_last)``: it stops
    earlier than O'Brien and Fleming's where the answer is clear. The boundaries are those of the paired t statistic
    itself, by simulation, not of a normal approximation, which would pass too often with a handful of pairs. Under the
    null hypothesis the statistic depends on no unknown, so they hold for every variance.
    """
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randn(PATHS, looks[-1], generator=draw, dtype=torch.float64)
    ends = torch.tensor(looks) - 1
    counts = torch.tensor(looks, dtype=torch.float64)
    sums, squares = numbers.cumsum(1)[:, ends], numbers.square().cumsum(1)[:, ends]
    errors = ((squares - sums.square() / counts) / (counts - 1) / counts).sqrt()
    statistic = sums / counts / errors

    alive = torch.ones(PATHS, dtype=torch.bool)
    bounds: dict[int, float] = {}
    for look, pairs in enumerate(looks):
        spent = alpha * math.log(1 + (math.e - 1) * pairs / looks[-1])
        may_cross = int(spent * PATHS) - int((~alive).sum())
        # The largest of those that have not crossed yet; none may, and the bound is out of reach.
        ordered = statistic[alive, look].sort(descending=True).values
        bounds[pairs] = float(ordered[may_cross]) if may_cross else math.inf
        alive &= statistic[:, look] <= bounds[pairs]

    # Without any effect the mean is one margin above the null hypothesis: so many deviations make the statistic pass.
    needed = (counts.new_tensor([*bounds.values()]) * errors - sums / counts).amin(1)
    return Design(bounds, 1 / needed.quantile(power).item())


class NonInferiority:
    """A sequential, paired, one-sided test that a metric is not worse by more than a margin.

    Pairs (one run of the baseline and one with the change, from the same seed) are added one by one. After some of them
    the test looks: PASS if the mean loss is below the margin, FAIL if it is above, each with an error rate of at most
    ``alpha`` over all looks together; else it goes on, and in the end is INCONCLUSIVE. Too few pairs are never a pass.
    A change that loses nothing passes with probability ``power``, if the differences' standard deviation is at most
    ``evidence()["allowed_deviation"]``; that a pair is normally distributed is assumed.

    Args:
        margin: how much worse is still as good, in the metric's unit, or as a share of the baseline's mean.
        most: the most pairs that will be used.
        relative: whether ``margin`` is a share, which wants a metric that stays away from zero.
        looks: after how many pairs to look, increasing; after 3, 4, 6, 8 and so on, unless told.
    """

    def __init__(
        self,
        margin: float, most: int = 20, *, larger_is_better: bool = True, relative: bool = False, alpha: float = 0.05,
        power: float = 0.8, looks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if margin <= 0 or not 0 < alpha < power < 1:
            raise ValueError("a margin is positive, and 0 < alpha < power < 1")
        planned = [look for look in looks or (3, *range(4, most, 2)) if look < most] + [most]
        if planned[0] < 2 or planned != sorted(set(planned)):
            raise ValueError("looks are increasing numbers of pairs, two at least")
        self.margin, self.relative, self.sign = margin, relative, 1 if larger_is_better else -1
        self.alpha, self.power, self.most = alpha, power, most
        self.design = design(tuple(planned), alpha, power)
        self.pairs: list[tuple[float, float]] = []
        self._decision: Outcome | None = None

    def __len__(self) -> int:
        """How many pairs were used."""
        return len(self.pairs)

    def add(self, baseline_value: float, changed_value: float) -> None:
        """Adds a pair of finite values; after a decision, or the last look, it changes nothing."""
        if not (math.isfinite(baseline_value) and math.isfinite(changed_value)):
            raise ValueError(f"a pair needs two finite values, got {baseline_value} and {changed_value}")
        if self._decision is not None or len(self.pairs) == self.most:
            return
        self.pairs.append((baseline_value, changed_value))
        bound = self.design.bounds.get(len(self.pairs))
        if bound is not None and abs(statistic := self._statistic()) > bound:
            self._decision = Outcome.PASS if statistic > 0 else Outcome.FAIL

    def decision(self) -> Outcome | None:
        """PASS or FAIL as soon as one of them is clear, else None."""
        return self._decision

    def conclude(self) -> Outcome:
        """What is known now that no more pairs come."""
        return self._decision or Outcome.INCONCLUSIVE

    def summary(self) -> str:
        """Where the test stands, on one line."""
        if len(self) < 2:
            return f"{len(self)} of {self.most} pairs, too few to tell"
        evidence = self.evidence()
        state = self._decision or (Outcome.INCONCLUSIVE if len(self) == self.most else "not clear yet")
        return (
            f"{state} after {len(self)} of {self.most} pairs: {evidence['mean_gain']:+.3g} in the mean (deviation "
            f"{evidence['deviation']:.2g}), margin {evidence['margin']:.3g}"
        )

    def evidence(self) -> dict[str, Any]:
        """The plan and the figures behind the conclusion, as plain data."""
        several = len(self.pairs) > 1
        statistic = self._statistic() if several else 0.0
        gains = [self.sign * (new - old) for old, new in self.pairs]
        size = abs(fmean(old for old, _ in self.pairs)) if self.pairs else 0.0
        margin = self.margin * size if self.relative else self.margin
        looks = [{"pairs": n, "bound": b if math.isfinite(b) else None} for n, b in self.design.bounds.items()]
        return {
            "method": "paired sequential t test, alpha spending (Lan and DeMets 1983, Pocock-like)",
            "margin": margin, "relative_margin": self.margin if self.relative else None,
            "alpha": self.alpha, "power": self.power, "allowed_deviation": self.design.allowed_deviation * margin,
            "deviation": stdev(gains) if several else None, "mean_gain": fmean(gains) if gains else None,
            "pairs": len(self.pairs), "most_pairs": self.most, "looks": looks,
            "t": statistic if math.isfinite(statistic) else str(statistic),
            "values": [list(pair) for pair in self.pairs],
        }  # fmt: skip

    def _statistic(self) -> float:
        """The t statistic of how much better than "worse by the margin" the change is."""
        side = math.copysign(1.0, fmean(old for old, _ in self.pairs))  # the margin is a share of the mean's size
        margins = [self.margin * (side * old if self.relative else 1.0) for old, _ in self.pairs]
        above = [self.sign * (new - old) + more for (old, new), more in zip(self.pairs, margins, strict=True)]
        mean, error = fmean(above), stdev(above) / math.sqrt(len(above))
        if error == 0:
            return math.copysign(math.inf, mean) if mean else 0.0
        return mean / error
