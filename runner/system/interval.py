"""Confidence intervals for the mean of a few values."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def widened(self, factor: float) -> "Interval":
        """Returns an interval that is wider by a factor, around the same mean."""
        # Without the comparison, an unbounded interval of one value would be computed with.
        if factor == 1:
            return self
        low = self.mean - factor * (self.mean - self.low)
        high = self.mean + factor * (self.high - self.mean)
        return Interval(self.mean, low, high)

    def clipped(self, lowest: float, highest: float) -> "Interval":
        """Returns the part of the interval with possible values."""
        return Interval(self.mean, max(self.low, lowest), min(self.high, highest))


def student(values: Sequence[float]) -> Interval:
    """Returns Student's t interval (1908), which is wide enough for few values, unlike
    a percentile bootstrap.

    It has its nominal coverage if the values are normal. For one value it is unbounded. With a value
    that is not finite, mean and bounds are NaN.
    """
    if not all(map(math.isfinite, values)):
        return Interval(math.nan, math.nan, math.nan)
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    from scipy.special import stdtrit

    reach = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - reach, mean + reach)
