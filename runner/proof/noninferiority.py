"""A sequential test for "not worse"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

import torch

from runner.proof.verdict import Outcome

FEWEST_PAIRS = 8  # for a PASS: with fewer, not even a change with which every third training collapses would be seen
COLLAPSE = 10.0  # margins, from which on a loss counts as a collapse
PATHS = 60_000  # simulated experiments, from which boundaries are taken: the error of a rate of 5 % is then 0.09 %


@dataclass(frozen=True)
class Design:
    """A plan for a sequential test, made before its first pair."""

    passes: Mapping[int, float]  # bound of ``hall`` for a PASS, by the number of pairs at a look
    fails: Mapping[int, float]  # the same of the differences with their signs turned round, for a FAIL
    allowed_deviation: float  # of a pair's difference, as a multiple of the margin, up to which the power is reached


def hall(differences: torch.Tensor) -> torch.Tensor:
    """Returns by how much the mean is above zero: Student's t, less the possible effect
    of a hidden lower tail.

    The cubic transformation of Hall (1992, "On the removal of skewness by transformation"), which rises with the mean.
    It is given twice the sample's skewness, because a small sample shows but a part of it, and none if that is
    positive: a long tail on the upper side earns nothing.

    Args:
        differences: samples [..., n], each of which has values that differ.
    """
    size, mean = differences.shape[-1], differences.mean(-1)
    centred = differences - mean.unsqueeze(-1)
    squares = centred.square()
    skewness = 2 * ((squares * centred).mean(-1) / squares.mean(-1).pow(1.5)).clamp(max=0)
    ratio = mean / differences.std(-1)
    return math.sqrt(size) * (ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / (6 * size))


@lru_cache
def design(looks: tuple[int, ...], alpha: float, power: float) -> Design:
    """Boundaries that spend ``alpha`` over the looks, for PASS and for FAIL, and the noise that ``power`` allows."""
    passes = boundaries(tuple(look for look in looks if look >= FEWEST_PAIRS), alpha)
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(PATHS // 4, looks[-1], generator=draw, dtype=torch.float64)
    low, high = 0.0, math.sqrt(looks[-1])
    while high - low > 0.004:  # the largest deviation with which enough pass if nothing is lost
        middle = (low + high) / 2
        gains = middle * noise
        passed = [
            (hall(gains[:, :look] + 1) > bound) & (gains[:, :look] > -COLLAPSE).all(1) for look, bound in passes.items()
        ]
        reached = bool(passed) and torch.stack(passed).any(0).double().mean() >= power
        low, high = (middle, high) if reached else (low, middle)
    return Design(passes, boundaries(looks, alpha), low)


def boundaries(looks: tuple[int, ...], alpha: float) -> Mapping[int, float]:
    """Returns bounds that ``hall`` exceeds at any of the looks with probability ``alpha`` at most,
    by simulation, if the mean is zero.

    That holds for normal differences, and for lognormal ones (sigma 1) with their long tail on the lower side, which of
    the usual families exceed a bound most often: Student's t would let 17 % of them pass after 20 pairs. Every look
    spends in proportion to its pairs (alpha spending of Lan and DeMets 1983; Kim and DeMets 1987 with rho = 1).
    """
    if not looks:
        return {}
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(PATHS, looks[-1], generator=draw, dtype=torch.float64)
    differences = torch.stack([normal, math.exp(0.5) - normal.exp()])  # [family, path, pair]
    alive = torch.ones(len(differences), PATHS, dtype=torch.bool)
    bounds: dict[int, float] = {}
    for look in looks:
        statistic = hall(differences[..., :look])
        ordered = statistic.masked_fill(~alive, -math.inf).sort(descending=True).values
        may_cross = int(alpha * look / looks[-1] * PATHS) - (~alive).sum(1)
        # The largest value of those that have not crossed yet; if none may cross, the
        # bound is infinite.
        of_family = [float(row[may]) if may else math.inf for row, may in zip(ordered, may_cross, strict=True)]
        bounds[look] = max(of_family)
        alive &= statistic <= bounds[look]
    return bounds


def plain(value: float) -> float | str:
    """Converts a number for JSON."""
    return value if math.isfinite(value) else str(value)


class NonInferiority:
    """A sequential, paired, one-sided test that a metric is not worse by more than a margin, and does not collapse.

    Pairs (one run of the baseline and one with the change, from the same seed) are added one by
    one. The test looks after some of them. A PASS, from the eighth pair on, has two meanings, each
    with an error rate of ``alpha``:

    * The mean loss is below the margin. That rate is simulated, not proven: with the usual
      ``alpha`` of 5 %, at most 6 % pass whose mean loss equals the margin, if differences are
      normal, Student's t with 3 degrees of freedom, uniform, exponential or lognormal (sigma 1)
      with the tail on either side, or bimodal. No test of a mean can guarantee it for every
      distribution, because the data may not contain a rare loss. Hence:
    * For any distribution, fewer than ``evidence()["excluded_share"]`` of the pairs collapse,
      because none has: ``1 - alpha ** (1 / pairs)``, the exact form of the rule of three. A
      collapse is a loss of ten margins, or of half of the baseline's mean if that is less and the
      margin is a share of it. With one such pair a PASS is impossible.

    FAIL means that the mean loss is above the margin, with the same error rate.
    Otherwise the test continues, and is INCONCLUSIVE in the end. A change without loss
    passes with probability ``power``, if differences are normal and their standard
    deviation is at most ``evidence()["allowed_deviation"]``; with a tail to the loss,
    less often. The figures: ``experiments/instrument/noninferiority.md``.

    Args:
        margin: The largest acceptable loss, in the metric's unit, or as a share of the
            baseline's mean.
        most: The largest number of pairs; with fewer than eight a PASS is impossible.
        relative: Whether ``margin`` is a share, which requires a metric far from zero.
        looks: Increasing numbers of pairs after which to look; by default 5, 8, 12, 16 and so on.
            To exclude that every fifth pair collapses, start at 14, every tenth at 29.
    """

    def __init__(
        self,
        margin: float, most: int = 20, *, larger_is_better: bool = True, relative: bool = False, alpha: float = 0.05,
        power: float = 0.8, looks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if margin <= 0 or not 0 < alpha < power < 1:
            raise ValueError("a margin is positive, and 0 < alpha < power < 1")
        planned = [look for look in looks or (5, *range(FEWEST_PAIRS, most, 4)) if look < most] + [most]
        if planned[0] < 2 or planned != sorted(set(planned)):
            raise ValueError("looks are increasing numbers of pairs, two at least")
        self.margin, self.relative, self.sign = margin, relative, 1 if larger_is_better else -1
        self.alpha, self.power, self.most, self.looks = alpha, power, most, tuple(planned)
        self.design = design(self.looks, alpha, power)
        self.pairs: list[tuple[float, float]] = []
        self._decision: Outcome | None = None

    def __len__(self) -> int:
        """Returns the number of used pairs."""
        return len(self.pairs)

    def add(self, baseline_value: float, changed_value: float) -> None:
        """Adds a pair of finite values; after a decision, or the last look, it changes nothing."""
        if not (math.isfinite(baseline_value) and math.isfinite(changed_value)):
            raise ValueError(f"a pair needs two finite values, got {baseline_value} and {changed_value}")
        if self._decision is not None or len(self.pairs) == self.most:
            return
        self.pairs.append((baseline_value, changed_value))
        if len(self) not in self.looks:
            return
        better, worse = self._statistics()
        if better > self.design.passes.get(len(self), math.inf) and not self._collapses():
            self._decision = Outcome.PASS
        elif worse > self.design.fails[len(self)]:
            self._decision = Outcome.FAIL

    def decision(self) -> Outcome | None:
        """PASS or FAIL as soon as one of them is clear, else None."""
        return self._decision

    def conclude(self) -> Outcome:
        """Returns the final outcome, without further pairs."""
        return self._decision or Outcome.INCONCLUSIVE

    def summary(self) -> str:
        """Returns the state of the test on one line."""
        if len(self) < 2:
            return f"{len(self)} of {self.most} pairs, too few for a verdict"
        evidence = self.evidence()
        state = self._decision or (Outcome.INCONCLUSIVE if len(self) == self.most else "not clear yet")
        lost, sure = f"lost {evidence['collapse']:.3g} or more", f"{1 - self.alpha:.0%}"
        collapses = f"{evidence['collapses']} of {len(self)} {lost}, which forbids a PASS"
        if not evidence["collapses"]:
            collapses = f"none {lost}: fewer than 1 in {1 / evidence['excluded_share']:.1f} do, with {sure}"
        return (
            f"{state} after {len(self)} of {self.most} pairs: {evidence['mean_gain']:+.3g} in the mean (deviation "
            f"{evidence['deviation']:.2g}), margin {evidence['margin']:.3g}; {collapses}"
        )

    def evidence(self) -> dict[str, Any]:
        """The plan and the figures behind the conclusion, as plain data."""
        several = len(self.pairs) > 1
        statistics = self._statistics() if several else (0.0, 0.0)
        gains, collapses = self._gains(), self._collapses()
        passes, fails = self.design.passes, self.design.fails
        looks = [(look, passes.get(look, math.inf), fails[look]) for look in self.looks]
        return {
            "method": "paired sequential test of the mean (Hall 1992) with bounds for lognormal differences, alpha "
            "spending (Kim and DeMets 1987, rho 1); no collapse (rule of three)",
            "margin": self._margin(), "relative_margin": self.margin if self.relative else None,
            "alpha": self.alpha, "power": self.power,
            "allowed_deviation": self.design.allowed_deviation * self._margin(),
            "deviation": stdev(gains) if several else None, "mean_gain": fmean(gains) if gains else None,
            "worst_gain": min(gains, default=None), "collapse": self._collapse(), "collapses": collapses,
            "excluded_share": 1 - self.alpha ** (1 / len(self)) if gains and not collapses else None,
            "pairs": len(self.pairs), "most_pairs": self.most,
            "looks": [{"pairs": n, "pass": plain(bound), "fail": plain(other)} for n, bound, other in looks],
            "statistics": {"pass": plain(statistics[0]), "fail": plain(statistics[1])},
            "values": [list(pair) for pair in self.pairs],
        }  # fmt: skip

    def _gains(self) -> list[float]:
        return [self.sign * (new - old) for old, new in self.pairs]

    def _size(self) -> float:
        """Returns the absolute mean of the baseline."""
        return abs(fmean(old for old, _ in self.pairs)) if self.pairs else 0.0

    def _margin(self) -> float:
        """Returns the margin in the metric's unit."""
        return self.margin * self._size() if self.relative else self.margin

    def _collapse(self) -> float:
        """Returns the loss from which a pair counts as collapsed."""
        return min(COLLAPSE * self._margin(), self._size() / 2 if self.relative else math.inf)

    def _collapses(self) -> int:
        """Returns the number of collapsed pairs."""
        return sum(gain <= -self._collapse() for gain in self._gains())

    def _statistics(self) -> tuple[float, float]:
        """Returns the statistics for the change being better than "worse by the
        margin", and for being worse.
        """
        side = math.copysign(1.0, fmean(old for old, _ in self.pairs))  # the margin is a share of the mean's size
        margins = [self.margin * (side * old if self.relative else 1.0) for old, _ in self.pairs]
        above = [gain + margin for gain, margin in zip(self._gains(), margins, strict=True)]
        if min(above) == max(above):
            clear = math.copysign(math.inf, above[0]) if above[0] else 0.0
            return clear, -clear
        better, worse = hall(torch.tensor([above, [-each for each in above]], dtype=torch.float64)).tolist()
        return better, worse
