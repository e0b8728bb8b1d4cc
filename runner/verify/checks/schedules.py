"""Compares updates all along the progress of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.plugin.contract import Close, Exact
from runner.plugin.lr_scheduler import ScheduleConfig
from runner.plugin.progress import Progress
from runner.proof.single_updates import same_updates
from runner.proof.trajectory import Update
from runner.proof.verdict import Verdict

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

POINTS = 101
"""Points at equal distances."""
SHARE_OF_LONG_RUN = 0.4
"""Seconds of this check, as a share of a long run's."""
_KINK = 1e-9
"""Second difference of a learning rate's factor that is more than rounding."""
_FINE = 10
"""Intervals between two points in which kinks are searched."""


class SchedulesCheck(Check):
    """Compares one update from one state, as if it was made at many points of the training."""

    name = "schedules"
    question = "Is an update the same wherever the training is?"
    catches = (
        "learning rates, weight decay or annealed coefficients that differ for a part of "
        "the training"
    )
    is_optional = True

    def applies(self, pair: StagePair) -> bool:
        """Returns False without a long run, and for stages that are inactive or ``Statistical``."""
        return pair.has_long_checks

    def cost(self, pair: StagePair) -> str:
        """Returns the number of updates and the most seconds."""
        seconds = SHARE_OF_LONG_RUN * pair.options.horizon_seconds
        return f"up to {POINTS} updates and both sides of each kink, or {seconds:g} s"

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares bits or algebra; where time is short, points that are spread evenly."""
        contract = pair.contract
        assert isinstance(contract, Exact | Close)
        long_run = budget.at_most(pair.options.horizon_seconds)
        seconds = SHARE_OF_LONG_RUN * long_run
        return same_updates(*pair.subjects(), _updates(pair), contract, seconds)


def _updates(pair: StagePair) -> Iterator[tuple[str, Update]]:
    """Yields the last recorded batch at every point, with the state of a model that has
    made a few updates.
    """
    baseline = pair.baseline
    recorded = baseline.batches[baseline.options.updates - 1]
    states = baseline.questions[0].states
    progress = baseline.progress
    kinks = find_kinks(pair.recipe.lr_scheduler)
    # Kinks come first, because the time may end before all points are compared.
    points = [*_both_sides(kinks, progress), *spread_points(POINTS)]
    for number, fraction in enumerate(points):
        counts = counts_at(recorded.progress, progress, fraction)
        batch = recorded._replace(progress=counts, inputs=None)
        yield f"at {fraction:.1%} of the training", Update(batch, states, number)


def counts_at(
    counts: Mapping[str, int], progress: Progress, fraction: float
) -> dict[str, int]:
    """Returns the counts of a training at a fraction of its length.

    Args:
        counts: Counts at ``progress``.
        progress: Progress of a training after some updates.
        fraction: 0 to 1.
    """
    ratio = fraction * progress.whole / max(1, progress.position)
    return {unit: round(ratio * count) for unit, count in counts.items()}


def spread_points(count: int) -> list[float]:
    """Returns points from 0 to 1 at equal distances, in an order whose beginnings are
    spread evenly.
    """

    def reversed_bits(number: int) -> int:
        return int(f"{number:010b}"[::-1], 2)

    order = sorted(range(count), key=reversed_bits)
    return [number / (count - 1) for number in order]


def find_kinks(schedule: ScheduleConfig) -> list[float]:
    """Returns the fractions of a training at which the slope of a learning rate changes
    suddenly.
    """
    steps = _FINE * (POINTS - 1)
    factors = [schedule.multiplier(number / steps) for number in range(steps + 1)]
    triples = zip(factors, factors[1:], factors[2:], strict=False)
    bends = [abs(start - 2 * middle + end) for start, middle, end in triples]
    # A smooth schedule bends everywhere, a kink bends much more.
    threshold = 100 * sorted(bends)[len(bends) // 2] + _KINK
    return [
        number / steps for number, bend in enumerate(bends, start=1) if bend > threshold
    ]


def _both_sides(kinks: list[float], progress: Progress) -> Iterator[float]:
    """Yields the fractions one count before and after each kink."""
    for kink in kinks:
        for distance in (-1, 0, 1):
            yield min(1.0, max(0.0, kink + distance / progress.whole))
