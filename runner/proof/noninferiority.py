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
from runner.system.stored_json import json_number

# For a PASS: with fewer, not even a change with which every third training collapses would be seen.
FEWEST_PAIRS = 8
# Margins from which on a loss counts as a collapse.
COLLAPSE = 10.0
# Simulated experiments for the boundaries: the error of a rate of 5 % is then 0.09 %.
PATHS = 60_000


@dataclass(frozen=True)
class Design:
    """A plan for a sequential test, made before its first pair.

    Attributes:
        passes: Bound of ``hall`` for a PASS, by the number of pairs at a look.
        fails: The same for a FAIL, of the differences with the opposite sign.
        allowed_deviation: Deviation of a pair's difference, as a multiple of the margin, up to
            which the power is reached.
    """

    passes: Mapping[int, float]
    fails: Mapping[int, float]
    allowed_deviation: float


def hall(differences: torch.Tensor) -> torch.Tensor:
    """Returns by how much the mean is above zero: Student's t, less the possible effect
    of a hidden lower tail.

    The cubic transformation of Hall (1992, "On the removal of skewness by transformation"), which
    rises with the mean. It is given twice the sample's skewness, because a small sample shows only
    a part of it, and none if that is positive: a long tail on the upper side earns nothing.

    Args:
        differences: samples [..., n], each of which has values that differ.
    """
    size = differences.shape[-1]
    mean = differences.mean(-1)
    centred = differences - mean.unsqueeze(-1)
    squares = centred.square()
    scale = squares.mean(-1).pow(1.5)
    skewness = 2 * ((squares * centred).mean(-1) / scale).clamp(max=0)
    ratio = mean / differences.std(-1)
    quadratic = skewness * ratio**2 / 3
    cubic = skewness**2 * ratio**3 / 27
    return math.sqrt(size) * (ratio + quadratic + cubic + skewness / (6 * size))


@lru_cache
def design(looks: tuple[int, ...], alpha: float, power: float) -> Design:
    """Returns boundaries that spend ``alpha`` over the looks, for PASS and for FAIL, and the noise
    that ``power`` allows.
    """
    passes = boundaries(tuple(look for look in looks if look >= FEWEST_PAIRS), alpha)
    generator = torch.Generator().manual_seed(1)
    shape = (PATHS // 4, looks[-1])
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Bisection of the largest deviation with which enough pass if nothing is lost.
    low = 0.0
    high = math.sqrt(looks[-1])
    while high - low > 0.004:
        middle = (low + high) / 2
        if _pass_rate(middle * noise, passes) >= power:
            low = middle
        else:
            high = middle
    return Design(passes, boundaries(looks, alpha), low)


def _pass_rate(gains: torch.Tensor, passes: Mapping[int, float]) -> float:
    """Returns the share of simulated experiments that pass, in units of the margin."""
    passed = torch.zeros(len(gains), dtype=torch.bool)
    for look, bound in passes.items():
        is_above = hall(gains[:, :look] + 1) > bound
        passed |= is_above & (gains[:, :look] > -COLLAPSE).all(1)
    return float(passed.double().mean())


def boundaries(looks: tuple[int, ...], alpha: float) -> Mapping[int, float]:
    """Returns bounds that ``hall`` exceeds at any of the looks with probability ``alpha`` at most,
    by simulation, if the mean is zero.

    That holds for normal differences, and for lognormal ones (sigma 1) with their long tail on the
    lower side, which exceed a bound most often of the usual families: Student's t would let 17 % of
    them pass after 20 pairs. Every look spends in proportion to its pairs (alpha spending of Lan
    and DeMets 1983; Kim and DeMets 1987 with rho = 1).
    """
    if not looks:
        return {}
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(PATHS, looks[-1], generator=generator, dtype=torch.float64)
    lognormal = math.exp(0.5) - normal.exp()
    differences = torch.stack([normal, lognormal])  # [family, path, pair]
    alive = torch.ones(len(differences), PATHS, dtype=torch.bool)
    bounds: dict[int, float] = {}
    for look in looks:
        statistic = hall(differences[..., :look])
        remaining = statistic.masked_fill(~alive, -math.inf)
        ordered = remaining.sort(descending=True).values
        may_cross = int(alpha * look / looks[-1] * PATHS) - (~alive).sum(1)
        # The largest value of those that have not crossed yet; if none may cross, the
        # bound is infinite.
        family_bounds = [
            float(row[count]) if count else math.inf
            for row, count in zip(ordered, may_cross, strict=True)
        ]
        bounds[look] = max(family_bounds)
        alive &= statistic <= bounds[look]
    return bounds


class NonInferiority:
    """A sequential, paired, one-sided test that a metric is not worse by more than a margin, and
    does not collapse.

    Pairs (one run of the baseline and one with the change, from the same seed) are added one by
    one. The test looks after some of them. A PASS, from the eighth pair on, has two meanings, each
    with an error rate of ``alpha``:

    * The mean loss is below the margin; a relative one is a share of the mean of the baseline's
      values that were added. That rate is simulated, not proven: with the usual
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
            baseline's mean over the pairs.
        most: The largest number of pairs; with fewer than eight a PASS is impossible.
        relative: Whether ``margin`` is a share, which requires a metric far from zero.
        looks: Increasing numbers of pairs after which to look; by default 5, 8, 12, 16 and so on.
            To exclude that every fifth pair collapses, start at 14, every tenth at 29.
    """

    def __init__(
        self,
        margin: float,
        most: int = 20,
        *,
        larger_is_better: bool = True,
        relative: bool = False,
        alpha: float = 0.05,
        power: float = 0.8,
        looks: Sequence[int] = (),
    ) -> None:
        if margin <= 0 or not 0 < alpha < power < 1:
            raise ValueError("a margin is positive, and 0 < alpha < power < 1")
        looks = looks or (5, *range(FEWEST_PAIRS, most, 4))
        planned = [look for look in looks if look < most] + [most]
        if planned[0] < 2 or planned != sorted(set(planned)):
            raise ValueError("looks are increasing numbers of pairs, two at least")
        self.margin = margin
        self.most = most
        self.sign = 1 if larger_is_better else -1
        self.relative = relative
        self.alpha = alpha
        self.power = power
        self.looks = tuple(planned)
        self.design = design(self.looks, alpha, power)
        self.pairs: list[tuple[float, float]] = []
        self._decision: Outcome | None = None

    def __len__(self) -> int:
        """Returns the number of used pairs."""
        return len(self.pairs)

    def add(self, baseline_value: float, changed_value: float) -> None:
        """Adds a pair of finite values; after a decision, or the last look, it changes nothing."""
        if not (math.isfinite(baseline_value) and math.isfinite(changed_value)):
            values = f"{baseline_value} and {changed_value}"
            raise ValueError(f"a pair needs two finite values, got {values}")
        # Another look after a decision would raise the error rate.
        if self._decision is not None or len(self.pairs) == self.most:
            return
        self.pairs.append((baseline_value, changed_value))
        if len(self) not in self.looks:
            return
        better, worse = self._statistics()
        pass_bound = self.design.passes.get(len(self), math.inf)
        if better > pass_bound and not self._collapses():
            self._decision = Outcome.PASS
        elif worse > self.design.fails[len(self)]:
            self._decision = Outcome.FAIL

    def decision(self) -> Outcome | None:
        """Returns PASS or FAIL as soon as one of them is clear, else None."""
        return self._decision

    def conclude(self) -> Outcome:
        """Returns the final outcome, without further pairs."""
        return self._decision or Outcome.INCONCLUSIVE

    def summary(self) -> str:
        """Returns the state of the test on one line."""
        if len(self) < 2:
            return f"{len(self)} of {self.most} pairs, too few for a verdict"
        evidence = self.evidence()
        state = "not clear yet"
        if self._decision is not None:
            state = self._decision
        elif len(self) == self.most:
            state = Outcome.INCONCLUSIVE
        loss = f"lost {evidence['collapse']:.3g} or more"
        if evidence["collapses"]:
            count = f"{evidence['collapses']} of {len(self)}"
            collapses = f"{count} {loss}, which forbids a PASS"
        else:
            excluded = 1 / evidence["excluded_share"]
            confidence = f"{1 - self.alpha:.0%}"
            collapses = (
                f"none {loss}: fewer than 1 in {excluded:.1f} do, with {confidence}"
            )
        mean = f"{evidence['mean_gain']:+.3g} in the mean"
        deviation = f"(deviation {evidence['deviation']:.2g})"
        return (
            f"{state} after {len(self)} of {self.most} pairs: {mean} {deviation}, "
            f"margin {evidence['margin']:.3g}; {collapses}"
        )

    def evidence(self) -> dict[str, Any]:
        """Returns the plan and the figures behind the conclusion, as plain data."""
        gains = self._gains()
        collapses = self._collapses()
        mean_gain = fmean(gains) if gains else None
        deviation = None
        statistics = (0.0, 0.0)
        if len(gains) > 1:
            deviation = stdev(gains)
            statistics = self._statistics()
        excluded_share = None
        if gains and not collapses:
            excluded_share = 1 - self.alpha ** (1 / len(gains))
        return {
            "method": (
                "paired sequential test of the mean (Hall 1992) with bounds for lognormal "
                "differences, alpha spending (Kim and DeMets 1987, rho 1); no collapse (rule of "
                "three)"
            ),
            "margin": self._margin(),
            "relative_margin": self.margin if self.relative else None,
            "alpha": self.alpha,
            "power": self.power,
            "allowed_deviation": self.design.allowed_deviation * self._margin(),
            "deviation": deviation,
            "mean_gain": mean_gain,
            "worst_gain": min(gains, default=None),
            "collapse": self._collapse(),
            "collapses": collapses,
            "excluded_share": excluded_share,
            "pairs": len(self.pairs),
            "most_pairs": self.most,
            "looks": [self._bounds(look) for look in self.looks],
            "statistics": {
                "pass": json_number(statistics[0]),
                "fail": json_number(statistics[1]),
            },
            "values": [list(pair) for pair in self.pairs],
        }

    def _bounds(self, look: int) -> dict[str, Any]:
        pass_bound = self.design.passes.get(look, math.inf)
        fail_bound = self.design.fails[look]
        return {
            "pairs": look,
            "pass": json_number(pass_bound),
            "fail": json_number(fail_bound),
        }

    def _gains(self) -> list[float]:
        return [self.sign * (changed - baseline) for baseline, changed in self.pairs]

    def _size(self) -> float:
        """Returns the absolute mean of the baseline."""
        if not self.pairs:
            return 0.0
        return abs(fmean(baseline for baseline, _ in self.pairs))

    def _margin(self) -> float:
        """Returns the margin in the metric's unit."""
        return self.margin * self._size() if self.relative else self.margin

    def _collapse(self) -> float:
        """Returns the loss from which a pair counts as collapsed."""
        limit = self._size() / 2 if self.relative else math.inf
        return min(COLLAPSE * self._margin(), limit)

    def _collapses(self) -> int:
        """Returns the number of collapsed pairs."""
        return sum(gain <= -self._collapse() for gain in self._gains())

    def _statistics(self) -> tuple[float, float]:
        """Returns the statistics for the change being better than "worse by the
        margin", and for being worse.
        """
        margin = self._margin()
        shifted = [gain + margin for gain in self._gains()]
        if min(shifted) == max(shifted):
            first = shifted[0]
            better = math.copysign(math.inf, first) if first else 0.0
            return better, -better
        opposite = [-value for value in shifted]
        samples = torch.tensor([shifted, opposite], dtype=torch.float64)
        better, worse = hall(samples).tolist()
        return better, worse
