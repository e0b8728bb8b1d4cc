"""Determines which trainings ``Statistical`` stages need, and their length."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch

from runner.child.spawn import may_fork
from runner.plugin.contract import Statistical
from runner.proof.isolation import StepError
from runner.proof.verdict import Outcome, Verdict
from runner.system.errors import DivergedError, RunnerError
from runner.training.device_memory import free_memory
from runner.training.pipeline import resolve_device
from runner.verify.process_effects import culprits
from runner.verify.statistical import (
    affordable,
    inconclusive,
    part_of,
    seeds_of,
    statistical,
)
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
        # A training whose length is given has no earlier end to be evaluated at.
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
            free_memory=partial(free_memory, device),
        )
        self.length = self.options.steps
        """Length of every training; None until the first ones have shown what the budget
        has room for.
        """
        self._full_length = length
        self._order = cache(self._order_of)

    def judged_sets(self) -> Iterator[tuple[str, ...]]:
        """Yields the sets of stages that this verification judges."""
        active = self.gate.baseline.active
        for kind in self.options.stages or (*active, ALL):
            if kind == ALL:
                yield active
            elif kind in active:
                kinds = {kind, *required(self.recipe.stages, kind)}
                yield tuple(stage for stage in active if stage in kinds)

    def begin(self) -> bool:
        """Starts trainings if some will be needed; returns whether it did.

        Stages that promise to be equal to the baseline are not judged yet, and count as
        equal.
        """
        if self.recipe.objective is None or self.trainings.seconds_left < 0:
            return False
        try:
            with self.gate.coverage.beginning():
                stages = self._first_trained()
                equal = [
                    kind
                    for kind, kinds in self._with_required().items()
                    if not self._is_statistical(kinds) or self._is_close(kinds)
                ]
        except (BuildError, StepError, torch.OutOfMemoryError, MemoryError, OutOfTime):
            # The verdict on these stages will report it.
            return False
        if stages is None:
            return False
        orders = [self._order(self._join(equal, kinds)) for kinds in ((), stages)]
        self.trainings.begin(orders, seeds_of(orders[0], self.options.seeds))
        return True

    def _first_trained(self) -> tuple[str, ...] | None:
        """Returns the first set of stages that only trainings can judge."""
        for stages in self.judged_sets():
            if self._is_statistical(stages) and not self._is_close(stages):
                return stages
        return None

    def judge(self, stages: tuple[str, ...]) -> Verdict:
        """Trains with and without the stages from the same seeds, until the objective
        decides.

        Raises:
            OutOfTime: The budget ended while trainings were compared.
        """
        objective = self.recipe.objective
        if objective is None:
            data = self.recipe.data.kind
            model = self.recipe.model.kind
            return inconclusive(
                f"neither data '{data}' nor model '{model}' names an objective "
                "by which to compare trainings"
            )
        not_begun = self.gate.coverage.not_begun
        if self.length is None and self.trainings.seconds_left < 0:
            return inconclusive(not_begun)
        changed = self._join(self.equal, stages)
        orders = self._order(self.equal), self._order(changed)
        # All cores train as soon as no other checks remain.
        for kinds in filter(self._is_close, self.judged_sets()):
            self.gate(kinds)
        if culprits():
            return inconclusive(not_begun)

        unit, full_length = self.recipe.length
        seeds = self.options.seeds
        try:
            with self.trainings.reserve_cores(0):
                length = self.length or self._affordable_length(orders, unit)
                verdict = statistical(*orders, length, objective, self.trainings, seeds)
                self.trainings.give_up()
        except DivergedError as error:
            summary = f"a training with it diverged: {error}"
            return Verdict(Outcome.FAIL, "Statistical", summary)
        except RunnerError as error:
            return inconclusive(str(error), {FAILED: str(error)})
        summary = verdict.summary
        if summary == NOT_BEGUN:
            summary = not_begun
        if length < full_length:
            summary += f", after {length:,} of {full_length:,} {unit}"
        evidence = {
            "stages": {"reference": self.equal, "changed": changed},
            "length": {unit: length},
        }
        return replace(verdict, summary=summary, evidence=verdict.evidence | evidence)

    def _affordable_length(
        self, orders: tuple[TrainingOrder, TrainingOrder], unit: str
    ) -> int:
        changes = self.count_changes(self.equal)
        self.length = affordable(
            *orders, unit, self.options.seeds, changes, self.trainings
        )
        # Trainings that are running end at this length, too.
        self.trainings.end_at(self.length)
        return self.length

    @cached_property
    def equal(self) -> tuple[str, ...]:
        """Stages that are equal to the baseline up to rounding, alone and together.

        They may be part of the baseline and of the changed recipe as well: trainings
        are faster with them, and those of a stage and of the complete recipe are often
        the same.
        """
        alone = self._with_required().items()
        kinds = tuple(
            kind for kind, required_kinds in alone if self._is_close(required_kinds)
        )
        return kinds if self._is_close(kinds) else ()

    def _with_required(self) -> dict[str, set[str]]:
        """Returns the active stages, with all that each of them requires."""
        return {
            kind: required(self.recipe.stages, kind) | {kind}
            for kind in self.gate.baseline.active
        }

    def count_changes(self, equal: Collection[str]) -> int:
        """Returns how many sets of stages are compared with the reference in trainings."""
        trained_sets = {self._join(equal, stages) for stages in self.judged_sets()}
        return sum(self._is_statistical({*kinds} - {*equal}) for kinds in trained_sets)

    def _join(self, equal: Collection[str], stages: Collection[str]) -> tuple[str, ...]:
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
        # Recorded batches cannot show the effect of such stages.
        if beyond_updates(self.recipe, stages) is not None:
            return False
        return bool(self.gate.closeness(stages))

    def _is_statistical(self, kinds: Collection[str]) -> bool:
        return isinstance(weakest(self.recipe, kinds), Statistical)

    def _order_of(self, kinds: tuple[str, ...]) -> TrainingOrder:
        staged = recipe_with(self.recipe, self.registry, kinds)
        return training_order(staged, self.registry, kinds, self._full_length)
