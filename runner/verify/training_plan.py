"""Determines which trainings ``Statistical`` stages need, and their length."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch

from runner.child.spawn import may_fork
from runner.plugin.contract import Statistical
from runner.proof.isolation import StepError
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import DivergedError, RunnerError
from runner.training.pipeline import resolve_device
from runner.verify.process_effects import culprits
from runner.verify.statistical import affordable, part_of, seeds_of, statistical
from runner.verify.subjects import BuildError, recipe_with
from runner.verify.time_limit import NOT_BEGUN, OutOfTime
from runner.verify.training_pool import TrainingOrder, Trainings, training_order
from runner.verify.variants import ALL, beyond_updates, required, weakest
from runner.verify.verification import FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.verify.gate import Gate


class TrainingPlan:
    """The trainings of one verification.

    Args:
        gate: Judges the stages that may replace the baseline in a training.
        report_progress: Receives lines for the progress bar.
    """

    def __init__(self, gate: Gate, report_progress: Callable[[str], None]) -> None:
        baseline = gate.baseline
        self.gate = gate
        self.recipe = baseline.recipe
        self.registry = baseline.registry
        self.options = baseline.options
        length = self.options.steps or self.recipe.length[1]
        interval = length if self.options.steps else part_of(length)
        device = resolve_device(self.recipe.device)
        compiles = device.type == "cpu" and any(
            stage.traces for stage in self.recipe.stages.values()
        )
        forked = may_fork(self.recipe.device, torch.cuda.is_available())
        self.trainings = Trainings(
            self.registry.files,
            self.options.budget,
            length,
            interval,
            report_progress,
            compiles,
            forked,
        )
        self.length = self.options.steps
        """Of every training; None until the first ones have shown what the budget has room for."""
        self._full_length = length
        self._order = cache(self._order_of)

    def judged_sets(self) -> Iterator[tuple[str, ...]]:
        """Yields the sets of stages that this verification judges."""
        active = self.gate.baseline.active
        for kind in self.options.stages or (*active, ALL):
            if kind == ALL:
                yield active
            elif kind in active:
                needed = {kind, *required(self.recipe.stages, kind)}
                yield tuple(stage for stage in active if stage in needed)

    def begin(self) -> bool:
        """Starts trainings if some will be needed; returns whether it did.

        Which stages are equal to the baseline is not known yet: those that promise it are taken to be.
        """
        if self.recipe.objective is None or self.trainings.seconds_left < 0:
            return False
        try:
            with self.gate.coverage.beginning():
                statistical_sets = (
                    stages
                    for stages in self.judged_sets()
                    if self._is_statistical(stages)
                )
                stages = next(
                    (
                        stages
                        for stages in statistical_sets
                        if not self._is_close(stages)
                    ),
                    None,
                )
                alone = {
                    kind: required(self.recipe.stages, kind) | {kind}
                    for kind in self.gate.baseline.active
                }
                equal = [
                    kind
                    for kind, kinds in alone.items()
                    if not self._is_statistical(kinds) or self._is_close(kinds)
                ]
        except (BuildError, StepError, torch.OutOfMemoryError, MemoryError, OutOfTime):
            return False
        if stages is None:
            return False
        orders = [self._order(self._beside(equal, kinds)) for kinds in ((), stages)]
        self.trainings.begin(orders, seeds_of(orders[0], self.options.seeds))
        return True

    def judge(self, stages: tuple[str, ...]) -> Verdict:
        """Trains with and without the stages from the same seeds, until the objective decides.

        Raises:
            OutOfTime: The budget ended while trainings were compared.
        """
        objective = self.recipe.objective
        if objective is None:
            data, model = self.recipe.data.kind, self.recipe.model.kind
            summary = f"neither data '{data}' nor model '{model}' names an objective by which to compare trainings"
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary)
        not_begun = self.gate.coverage.not_begun
        if self.length is None and self.trainings.seconds_left < 0:
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", not_begun)
        changed = self._beside(self.equal, stages)
        orders = self._order(self.equal), self._order(changed)
        # All cores train as soon as nothing else is left to judge.
        for kinds in filter(self._is_close, self.judged_sets()):
            self.gate(kinds)
        if culprits():
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", not_begun)
        unit, full_length = self.recipe.length
        try:
            with self.trainings.reserve_cores(0):
                length = self.length or self._affordable_length(orders, unit)
                verdict = statistical(
                    *orders, length, objective, self.trainings, self.options.seeds
                )
                self.trainings.give_up()
        except DivergedError as error:
            return Verdict(
                Outcome.FAIL, "Statistical", f"a training with it diverged: {error}"
            )
        except RunnerError as error:
            return Verdict(
                Outcome.INCONCLUSIVE, "Statistical", str(error), {FAILED: str(error)}
            )
        if verdict.summary == NOT_BEGUN:
            verdict = replace(verdict, summary=not_begun)
        shorter = (
            f", after {length:,} of {full_length:,} {unit}"
            if length < full_length
            else ""
        )
        trained = {
            "stages": {"reference": self.equal, "changed": changed},
            "length": {unit: length},
        }
        return replace(
            verdict,
            summary=verdict.summary + shorter,
            evidence=verdict.evidence | trained,
        )

    def _affordable_length(
        self, orders: tuple[TrainingOrder, TrainingOrder], unit: str
    ) -> int:
        changes = self.count_changes(self.equal)
        self.length = affordable(
            *orders, unit, self.options.seeds, changes, self.trainings
        )
        self.trainings.end_at(self.length)
        return self.length

    @cached_property
    def equal(self) -> tuple[str, ...]:
        """Stages that are equal to the baseline up to rounding, alone and together.

        They may be part of the baseline and of the changed recipe as well: trainings are faster
        with them, and those of a stage and of the complete recipe are often the same.
        """
        alone = {
            kind: required(self.recipe.stages, kind) | {kind}
            for kind in self.gate.baseline.active
        }
        kinds = tuple(kind for kind, needed in alone.items() if self._is_close(needed))
        return kinds if self._is_close(kinds) else ()

    def count_changes(self, equal: Collection[str]) -> int:
        """Returns how many sets of stages are compared with the reference in trainings."""
        trained_sets = {self._beside(equal, stages) for stages in self.judged_sets()}
        return sum(self._is_statistical({*kinds} - {*equal}) for kinds in trained_sets)

    def _beside(
        self, equal: Collection[str], stages: Collection[str]
    ) -> tuple[str, ...]:
        """Returns the stages that are judged by trainings, and those that are part of the
        baseline.
        """
        return tuple(
            kind
            for kind in self.gate.baseline.active
            if kind in stages or kind in equal
        )

    def _is_close(self, kinds: Collection[str]) -> bool:
        """Returns whether stages were proven equal up to rounding."""
        stages = tuple(kind for kind in self.gate.baseline.active if kind in kinds)
        if not self._is_statistical(stages):
            return bool(self.gate(stages))
        return beyond_updates(self.recipe, stages) is None and bool(
            self.gate.closeness(stages)
        )

    def _is_statistical(self, kinds: Collection[str]) -> bool:
        return isinstance(weakest(self.recipe, kinds), Statistical)

    def _order_of(self, kinds: tuple[str, ...]) -> TrainingOrder:
        chosen = recipe_with(self.recipe, self.registry, kinds)
        return training_order(chosen, self.registry, kinds, self._full_length)
