"""Compares trainings on several processes with trainings on one, where their samples differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from runner.distributed.process_group import MissingPeerError, PeerError
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.loader import from_values
from runner.system import generators
from runner.system.errors import DivergedError, RunnerError
from runner.training.evaluation import evaluated
from runner.training.loop import Loop
from runner.training.outputs import NoOutput
from runner.training.pipeline import assemble, resolve_device
from runner.training.signals import Stop
from runner.verify.process_pair import active_stages, mirror, verify_processes
from runner.verify.statistical import inconclusive, part_of, seeds_of, statistical
from runner.verify.time_limit import NOT_BEGUN
from runner.verify.training_pool import Milestone, TrainingOrder, training_order
from runner.verify.verification import FAILED, StageVerdict, Verification

if TYPE_CHECKING:
    from runner.distributed.process_group import ProcessGroup
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.verify.options import Options

_SPARE = 0.1
"""Share of the budget that is not planned, because durations vary."""
_EVALUATION = "eval/"


def verify_group(
    recipe: Recipe,
    registry: Registry,
    group: ProcessGroup,
    options: Options,
    say: Callable[[str], None],
) -> Verification:
    """Verifies that several processes train like one; the others call ``follow_verification``.

    Updates on the same samples are ``Close``. Where processes draw their samples themselves, a
    training has other samples than on one process, and trainings from paired seeds have to be as
    good.

    Args:
        recipe: The recipe.
        registry: The plugins.
        group: The processes, of which this is the first.
        options: Thoroughness of the comparison.
        say: Receives lines about the progress.
    """
    started = time.perf_counter()
    report = verify_processes(recipe, registry, group, options.updates)
    if recipe.data.division != "draws":
        return report
    trainings = GroupTrainings(recipe, registry, group, options.budget, say)
    name = f"{group.count} processes"
    # Trainings cost minutes, and say nothing more about updates that are incorrect.
    verdict = inconclusive("not trained, because the updates differ")
    try:
        if report.outcome is Outcome.PASS:
            verdict = judge_trainings(trainings, options)
    finally:
        trainings.end()
    (updates,) = report.rows
    rows = (
        replace(
            updates,
            name=f"{name}, the same samples",
            summary=f"{updates.summary}; in a training each process draws its own samples, which "
            "no single process draws",
        ),
        StageVerdict(
            f"{name}, trainings",
            active_stages(recipe, group.count),
            verdict.contract,
            verdict.outcome,
            verdict.summary,
            verdict.evidence,
        ),
    )
    seconds = time.perf_counter() - started
    return replace(report, rows=rows, seconds=seconds, budget=options.budget or None)


def follow_verification(
    recipe: Recipe, registry: Registry, stages: Sequence[str], group: ProcessGroup
) -> None:
    """Does what ``verify_group`` does in the first process."""
    mirror(recipe, registry, stages, group)
    if recipe.data.division != "draws":
        return
    follow_trainings(recipe, registry, group)


def follow_trainings(recipe: Recipe, registry: Registry, group: ProcessGroup) -> None:
    """Trains what ``GroupTrainings`` orders in the first process, until that ends."""
    while (order := group.decide(_no_order)) is not None:
        group.collect(train_seeds(recipe, registry, group, order))
    # The first process, which may have the store, ends after all have read that there is no order.
    group.collect(None)


def judge_trainings(trainings: GroupTrainings, options: Options) -> Verdict:
    """Returns whether trainings on several processes are at most a margin worse."""
    recipe = trainings.recipe
    objective = recipe.objective
    if objective is None:
        kinds = f"neither data '{recipe.data.kind}' nor model '{recipe.model.kind}'"
        return inconclusive(f"{kinds} names an objective by which to compare trainings")
    if trainings.seconds_left < 0 or not options.budget:
        return inconclusive(NOT_BEGUN)
    unit, full_length = recipe.length
    try:
        length = options.steps or trainings.affordable_length(options.seeds)
        verdict = statistical(
            trainings.single,
            trainings.divided,
            length,
            objective,
            trainings,
            options.seeds,
        )
    except DivergedError as error:
        summary = f"a training on {trainings.group.count} processes diverged: {error}"
        return Verdict(Outcome.FAIL, "Statistical", summary)
    except RunnerError as error:
        return inconclusive(str(error), {FAILED: str(error)})
    summary = verdict.summary
    if length < full_length:
        summary += f", after {length:,} of {full_length:,} {unit}"
    evidence = verdict.evidence | {"length": {unit: length}}
    return replace(verdict, summary=summary, evidence=evidence)


class GroupTrainings:
    """Trains a recipe on one process and on several, each seed once.

    Trainings on one process run side by side, one in each process of the group.

    Attributes:
        single: The training on one process.
        divided: The training on all processes.

    Args:
        recipe: The recipe.
        registry: The plugins.
        group: The processes, of which this is the first.
        budget: Seconds from now on after which no training starts.
        say: Receives lines about the progress.
    """

    def __init__(
        self,
        recipe: Recipe,
        registry: Registry,
        group: ProcessGroup,
        budget: float,
        say: Callable[[str], None],
    ) -> None:
        self.recipe = recipe
        self.registry = registry
        self.group = group
        self.say = say
        self.single = TrainingOrder(recipe.values(masked=False))
        self.divided = TrainingOrder(self.single.recipe)
        self._end = time.monotonic() + budget
        self._milestones: dict[tuple[bool, int, int], Milestone] = {}

    @property
    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget; negative once it is spent."""
        return self._end - time.monotonic()

    def are_over(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> bool:
        """Returns whether all trainings have reached a length."""
        keys = self._keys(trainings, seeds, length)
        return all(key in self._milestones for key in keys)

    def run(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> list[Milestone]:
        """Returns evaluations at this length of every training with every seed, trainings
        outermost.

        Raises:
            DivergedError: A training on several processes diverged.
            RunnerError: A training on one process did.
        """
        keys = self._keys(trainings, seeds, length)
        for training in trainings:
            is_divided = training is self.divided
            missing = [
                seed
                for seed in seeds
                if (is_divided, seed, length) not in self._milestones
            ]
            if missing:
                self._train(is_divided, missing, length)
        return [self._milestones[key] for key in keys]

    def affordable_length(self, pairs: int) -> int:
        """Returns the longest length with which all trainings fit into the budget: at least a
        fifth of the recipe's.
        """
        unit, length = self.recipe.length
        part = part_of(length)
        (seed,) = seeds_of(self.single, 1)
        single, divided = self.run([self.single, self.divided], [seed], part)
        # As many trainings on one process run side by side as there are processes.
        per_part = pairs * (single.seconds / self.group.count + divided.seconds)
        most_parts = (1 - _SPARE) * self.seconds_left / per_part
        affordable = min(length, part * max(1, math.floor(most_parts)))
        if affordable < length:
            needed = per_part * length / part / (1 - _SPARE)
            self.say(
                f"the budget has room for trainings of {affordable:,} {unit}; "
                f"--budget {60 * math.ceil(needed / 60)} for all {length:,}"
            )
        return affordable

    def end(self) -> None:
        """Ends the waiting of the other processes."""
        self.group.decide(_no_order)
        self.group.collect(None)

    def _keys(
        self, trainings: Sequence[TrainingOrder], seeds: Sequence[int], length: int
    ) -> list[tuple[bool, int, int]]:
        return [
            (training is self.divided, seed, length)
            for training in trainings
            for seed in seeds
        ]

    def _train(self, is_divided: bool, seeds: Sequence[int], length: int) -> None:
        order = {"is_divided": is_divided, "seeds": list(seeds), "length": length}
        self.group.decide(lambda: order)
        results = train_seeds(self.recipe, self.registry, self.group, order)
        by_rank = self.group.collect(results)
        # All processes have the same result of a training in which they have taken part.
        for name, result in by_rank[0].items() if is_divided else _joined(by_rank):
            if "error" in result:
                is_failure = is_divided and result["has_diverged"]
                error = DivergedError if is_failure else RunnerError
                raise error(f"seed {name}: {result['error']}")
            key = (is_divided, int(name), length)
            self._milestones[key] = Milestone(length, **result)


def train_seeds(
    recipe: Recipe, registry: Registry, group: ProcessGroup, order: dict[str, Any]
) -> dict[str, Any]:
    """Trains a recipe with some seeds.

    Args:
        recipe: The recipe.
        registry: The plugins.
        group: The processes.
        order: ``is_divided``, whether all processes train together or each its share of the seeds
            alone; ``seeds``; and ``length``.

    Returns:
        By seed, in the types of JSON: the fields of a ``Milestone``, or the ``error`` of a
        training, and whether it has diverged.
    """
    seeds = order["seeds"]
    if not order["is_divided"]:
        seeds = seeds[group.rank :: group.count]
    results = {}
    for seed in seeds:
        values = _values_of_training(recipe, registry, seed, order["length"])
        trained = None
        if order["is_divided"]:
            trained = group
        elif resolve_device(recipe.device).type == "cuda":
            values["device"] = f"cuda:{group.local_rank}"
        try:
            results[str(seed)] = _train(
                from_values(
                    values, str(recipe.path), recipe.origins, registry, recipe.tuning
                ),
                registry,
                trained,
            )
        except (PeerError, MissingPeerError):
            raise
        # An error of one process must not leave the others waiting for its answer.
        except RunnerError as error:
            has_diverged = isinstance(error, DivergedError)
            results[str(seed)] = {"error": str(error), "has_diverged": has_diverged}
    return results


def _train(
    recipe: Recipe, registry: Registry, group: ProcessGroup | None
) -> dict[str, Any]:
    """Trains a recipe without a record, and returns the fields of a ``Milestone``."""
    generators.seed(recipe.seed)
    pipeline = assemble(recipe, registry.files, processes=group)
    initial = evaluated(pipeline)
    started = time.monotonic()
    output = NoOutput()
    with TemporaryDirectory(prefix="runner-process-") as folder:
        loop = Loop(pipeline, Path(folder), output, output, Stop())
        loop.run()
    seconds = time.monotonic() - started
    metrics = {
        name.removeprefix(_EVALUATION): value
        for name, value in loop.metrics.items()
        if name.startswith(_EVALUATION)
    }
    return {
        "initial": initial,
        "metrics": metrics,
        "seconds": seconds,
        "growing_seconds": seconds,
    }


def _values_of_training(
    recipe: Recipe, registry: Registry, seed: int, length: int
) -> dict[str, Any]:
    """Returns the values of a recipe that is evaluated before and after a training."""
    values = dict(training_order(recipe, registry, (), length).recipe)
    values["train"] |= {"evaluate_every": None}
    return values | {"seed": seed}


def _no_order() -> dict[str, Any] | None:
    """Ends the waiting for orders."""
    return None


def _joined(results: Sequence[dict[str, Any]]) -> Sequence[tuple[str, Any]]:
    return [entry for part in results for entry in part.items()]
