"""Judges by complete trainings with paired seeds whether a recipe learns as well
with a stage as without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from runner.plugin.contract import Objective
from runner.proof.noninferiority import NonInferiority
from runner.proof.verdict import Outcome, Verdict
from runner.system.hardware import usable_cores
from runner.verify.time_limit import NOT_BEGUN, OutOfTime
from runner.verify.training_pool import Milestone, TrainingOrder, Trainings

# Parts of a recipe's length; trainings are evaluated after each of them, and may end there.
PARTS = 5
_SPARE = 0.1  # share of the remaining budget, because durations of trainings vary


def seeds_of(training: TrainingOrder, pairs: int) -> list[int]:
    """Returns the seeds of ``pairs`` pairs, without that of the recipe."""
    return [int(training.recipe["seed"]) + 1 + i for i in range(pairs)]


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
    length, seeds = trainings.length, seeds_of(reference, pairs)
    lengths: list[int] = [*range(trainings.every, length, trainings.every), length]
    trainings.run([reference, changed], seeds[:1], lengths[0])
    found = [
        (1, trainings.newest(reference, seeds)),
        (changes, trainings.newest(changed, seeds)),
    ]
    at_a_time, left = min(usable_cores(), pairs * (1 + changes)), trainings.seconds_left

    def needed(steps: int) -> float:
        """Seconds for what is left of all trainings of this length."""
        whole = sum(times * pairs * _cost(known, steps) for times, known in found)
        over = sum(
            _cost(known, min(steps, each.done)) for _, known in found for each in known
        )
        return (whole - over) / at_a_time / (1 - _SPARE)

    steps = next(
        (each for each in reversed(lengths) if needed(each) <= left), lengths[0]
    )
    if steps < length:
        enough = 60 * math.ceil((trainings.budget - left + needed(length)) / 60)
        trainings.say(
            f"the budget has room for trainings of {steps:,} {unit}; --budget {enough} for all {length:,}"
        )
    return steps


def _cost(known: Sequence[Milestone], steps: int) -> float:
    """Seconds of a training of this length, by those that were trained, however far."""
    warm = known[1:] or known  # the first compiles what the others find compiled
    start = median([each.seconds - each.growing_seconds for each in warm])
    growth = median([each.growing_seconds / each.done for each in warm])
    return start + steps * growth


def statistical(
    reference: TrainingOrder, changed: TrainingOrder, length: int, objective: Objective, trainings: Trainings,
    most_seeds: int,
) -> Verdict:  # fmt: skip
    """Trains a recipe without and with a stage from the same seeds, until it is clear whether it learns less with it.

    The result of a training is the objective after this length minus the one before it. The mean
    loss of the changed recipe over seeds may not exceed the objective's margin: in its unit, or as
    a share of what the reference learns. If that is not clear after the largest number of seeds, or
    a training diverged only with the stage, the verdict is INCONCLUSIVE.

    Raises:
        DivergedError: a training with the stage did.
    """
    name, sign = objective.name, objective.sign
    test = NonInferiority(
        margin=objective.margin, most=most_seeds, relative=objective.unit is None
    )
    for first, look in itertools.pairwise((0, *test.looks)):
        seeds = seeds_of(reference, look)[first:]
        if trainings.seconds_left < 0 and not trainings.are_over(
            [reference, changed], seeds, length
        ):
            break
        try:
            results = trainings.run([reference, changed], seeds, length)
        except OutOfTime:
            raise OutOfTime(
                f"{name}, {len(test)} seeds: {test.summary()}" if len(test) else ""
            ) from None
        missing = [milestone for milestone in results if not _measured(milestone, name)]
        if missing:
            summary = f"eval/{name} is not measured, or no finite number: declare the objective"
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary)
        gains = [sign * (each.after[name] - each.before[name]) for each in results]
        for pair in zip(gains[: len(seeds)], gains[len(seeds) :], strict=True):
            test.add(*pair)
        learnt = sum(without for without, _ in test.pairs) / len(test)
        if learnt <= 0:
            summary = (
                f"the reference learns nothing: {name} does not improve; train longer"
            )
            return Verdict(
                Outcome.INCONCLUSIVE, "Statistical", summary, test.evidence()
            )
        trainings.say(f"{name}, {len(test)} seeds: {test.summary()}")
        if test.decision() is not None:
            break
    if not len(test):
        return Verdict(Outcome.INCONCLUSIVE, "Statistical", NOT_BEGUN)
    return Verdict(
        test.conclude(),
        "Statistical",
        f"{name}: {test.summary()}",
        {"metric": name, **test.evidence()},
    )


def _measured(milestone: Milestone, name: str) -> bool:
    """Returns whether a metric was measured before the training and here; a
    declared objective always is.
    """
    values = [
        metrics.get(name, math.nan) for metrics in (milestone.before, milestone.after)
    ]
    return all(map(math.isfinite, values))
