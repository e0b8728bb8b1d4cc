"""Judges by complete trainings with paired seeds whether a recipe learns as well
with a stage as without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from runner.plugin.contract import Objective
from runner.proof.noninferiority import NonInferiority
from runner.proof.verdict import Outcome, Verdict
from runner.verify.time_limit import NOT_BEGUN, OutOfTime
from runner.verify.training_pool import Milestone, TrainingOrder, Trainings

PARTS = 5
"""Parts of a recipe's length; trainings are evaluated after each of them, and may end
there.
"""
# Durations of trainings vary.
_SPARE = 0.1
"""Share of the remaining budget that is not planned."""


class PairedTrainings(Protocol):
    """Runs trainings and evaluates them."""

    @property
    def say(self) -> Callable[[str], None]:
        """Returns a function that receives lines about the progress."""

    @property
    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget; negative once it is spent."""

    def are_over(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> bool:
        """Returns whether all trainings have reached a length."""

    def run(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> list[Milestone]:
        """Returns evaluations at this length of every training with every seed, trainings
        outermost.
        """


def seeds_of(training: TrainingOrder, pairs: int) -> list[int]:
    """Returns the seeds of ``pairs`` pairs, without that of the recipe."""
    first = int(training.recipe["seed"]) + 1
    return list(range(first, first + pairs))


def part_of(length: int) -> int:
    """Returns the distance between two evaluations of a training."""
    return math.ceil(length / PARTS)


def affordable(
    reference: TrainingOrder,
    changed: TrainingOrder,
    unit: str,
    pairs: int,
    changes: int,
    trainings: Trainings,
) -> int:
    """Returns the longest length with which all trainings fit into the budget: at
    least a fifth of the recipe's length.

    The finished parts of trainings determine the expected cost, and at least a
    fifth of one pair is trained. Trainings are evaluated wherever they may end,
    so that a longer training counts as well.

    Args:
        reference: The training without the change.
        changed: The training with it.
        unit: The unit of a training's length.
        pairs: The number of seeds.
        changes: The number of changes that are compared with the reference, each
            in separate trainings.
        trainings: Runs trainings; contains the budget, the recipe's length, and
            the intervals of evaluations.

    Raises:
        DivergedError: the training with the change did.
    """
    length = trainings.length
    seeds = seeds_of(reference, pairs)
    lengths: list[int] = [*range(trainings.every, length, trainings.every), length]
    # A part of one pair shows the cost of all trainings.
    trainings.run([reference, changed], seeds[:1], lengths[0])
    milestones = [
        (1, trainings.newest(reference, seeds)),
        (changes, trainings.newest(changed, seeds)),
    ]
    processes = min(trainings.most_running, pairs * (1 + changes))
    seconds_left = trainings.seconds_left

    def remaining_seconds(steps: int) -> float:
        """Returns the seconds that all trainings of this length still take."""
        total = 0.0
        spent = 0.0
        for repetitions, finished in milestones:
            total += repetitions * pairs * _cost(finished, steps)
            for milestone in finished:
                spent += _cost(finished, min(steps, milestone.done))
        return (total - spent) / processes / (1 - _SPARE)

    steps = lengths[0]
    for candidate in reversed(lengths):
        if remaining_seconds(candidate) <= seconds_left:
            steps = candidate
            break
    if steps < length:
        used = trainings.budget - seconds_left
        enough = 60 * math.ceil((used + remaining_seconds(length)) / 60)
        trainings.say(
            f"the budget has room for trainings of {steps:,} {unit}; "
            f"--budget {enough} for all {length:,}"
        )
    return steps


def _cost(milestones: Sequence[Milestone], steps: int) -> float:
    """Returns the seconds of a training of this length, by those that were trained,
    however far.
    """
    # The first training compiles code that the others load.
    warm = milestones[1:] or milestones
    start = median(
        [milestone.seconds - milestone.growing_seconds for milestone in warm]
    )
    growth = median([milestone.growing_seconds / milestone.done for milestone in warm])
    return start + steps * growth


def statistical(
    reference: TrainingOrder,
    changed: TrainingOrder,
    length: int,
    objective: Objective,
    trainings: PairedTrainings,
    most_seeds: int,
) -> Verdict:
    """Trains a recipe without and with a stage from the same seeds, until it is clear
    whether it learns less with it.

    The result of a training is the objective after this length minus the one before it.
    The mean loss of the changed recipe over seeds may not exceed the objective's
    margin: in its unit, or as a share of the reference's improvement. If that is not
    clear after the largest number of seeds, or a training diverged only with the stage,
    the verdict is INCONCLUSIVE.

    Raises:
        DivergedError: a training with the stage did.
    """
    name = objective.name
    orders = [reference, changed]
    relative = objective.unit is None
    test = NonInferiority(margin=objective.margin, most=most_seeds, relative=relative)
    for first, look in itertools.pairwise((0, *test.looks)):
        seeds = seeds_of(reference, look)[first:]
        is_over = trainings.seconds_left < 0
        if is_over and not trainings.are_over(orders, seeds, length):
            break
        try:
            results = trainings.run(orders, seeds, length)
        except OutOfTime:
            summary = (
                f"{name}, {len(test)} seeds: {test.summary()}" if len(test) else ""
            )
            raise OutOfTime(summary) from None
        if not all(_is_measured(milestone, name) for milestone in results):
            return inconclusive(
                f"eval/{name} is not measured, or no finite number: "
                "declare the objective"
            )
        gains = [
            objective.sign * (milestone.metrics[name] - milestone.initial[name])
            for milestone in results
        ]
        pairs = zip(gains[: len(seeds)], gains[len(seeds) :], strict=True)
        for baseline_gain, gain in pairs:
            test.add(baseline_gain, gain)
        mean_gain = sum(baseline_gain for baseline_gain, _ in test.pairs) / len(test)
        # The margin may be a share of this gain.
        if mean_gain <= 0:
            summary = (
                f"the reference learns nothing: {name} does not improve; train longer"
            )
            return inconclusive(summary, test.evidence())
        trainings.say(f"{name}, {len(test)} seeds: {test.summary()}")
        if test.decision() is not None:
            break
    if not len(test):
        return inconclusive(NOT_BEGUN)
    evidence = {"metric": name, **test.evidence()}
    summary = f"{name}: {test.summary()}"
    return Verdict(test.conclude(), "Statistical", summary, evidence)


def inconclusive(summary: str, evidence: dict[str, Any] | None = None) -> Verdict:
    """Returns the verdict on a comparison of trainings without a result."""
    return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary, evidence or {})


def _is_measured(milestone: Milestone, name: str) -> bool:
    """Returns whether a metric was measured before the training and here; a
    declared objective always is.
    """
    evaluations = (milestone.initial, milestone.metrics)
    return all(math.isfinite(metrics.get(name, math.nan)) for metrics in evaluations)
