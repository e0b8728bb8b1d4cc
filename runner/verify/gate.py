"""Judges whether the stages of a recipe are harmless: each alone, and all together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch

from runner.plugin.registry import Registry
from runner.proof.first_operator import SECONDS, name_operator
from runner.proof.isolation import StepError
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.training.pipeline import resolve_device
from runner.verify.baseline import Baseline
from runner.verify.callback_effects import judge_callbacks
from runner.verify.checks import checks_of
from runner.verify.conclusion import conclude
from runner.verify.coverage import Coverage
from runner.verify.options import Options
from runner.verify.pair import StagePair
from runner.verify.process_effects import culprits, note_effects, uncomparable
from runner.verify.subjects import BuildError
from runner.verify.time_limit import OutOfTime
from runner.verify.training_plan import TrainingPlan
from runner.verify.variants import ALL, variants_of
from runner.verify.verification import Phase, StageVerdict, Verification, judged


def verify_recipe(
    recipe: Recipe,
    registry: Registry,
    options: Options,
    say: Callable[[str], None],
    phase: Phase = nullcontext,
) -> Verification:
    """Compares every active stage alone, with the stages that it requires, and
    the complete recipe with the baseline; and trainings with and without each callback.

    Arguments are those of ``Gate``.
    """
    started = time.perf_counter()
    device = resolve_device(recipe.device)
    possible = variants_of(recipe, device, ("alone", "all"))
    kinds = options.stages
    # Who names stages wants verdicts on these alone.
    observers: tuple[StageVerdict, ...] = ()
    if recipe.callbacks and not kinds:
        observers = judge_callbacks(recipe, registry, options.updates, phase)
        if not any(variant.stages for variant in possible.variants):
            seconds = time.perf_counter() - started
            budget = options.budget or None
            inactive = dict(possible.inactive)
            return Verification(recipe.name, observers, inactive, seconds, None, budget)
    gate = Gate(recipe, registry, options, say, phase)
    # Trainings take longest, so they start while other checks are running.
    with gate.plan.trainings.ahead(device, gate.plan.begin):
        report = judged(recipe, possible, kinds, gate, say, options.budget, phase)
    rows = (*report.rows, *observers)
    return replace(report, rows=rows, seconds=time.perf_counter() - started)


class Gate:
    """Judges sets of stages of one recipe by a list of checks.

    Args:
        recipe: The recipe with all of its stages.
        registry: The plugins, which may add checks.
        options: Thoroughness of the comparison.
        say: Receives lines for the progress bar.
        phase: Entered with the name of the stage and the check that is running.
    """

    def __init__(
        self,
        recipe: Recipe,
        registry: Registry,
        options: Options,
        say: Callable[[str], None],
        phase: Phase = nullcontext,
    ) -> None:
        self.baseline = Baseline(recipe, registry, options)
        self.coverage = Coverage(options.budget)
        self.phase = phase
        self.plan = TrainingPlan(self, say)
        self.checks = checks_of(registry, self.plan)
        self.pair = cache(self._make_pair)
        # A set of stages may be judged for several reasons, with one verdict.
        self._verdict = cache(self._judge)

    def __call__(self, stages: Sequence[str]) -> Verdict:
        """Returns the verdict on a set of stages, by the weakest of their contracts."""
        return self._verdict(tuple(stages))

    def idle(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Returns which of the stages that were judged together did nothing, with the
        reason.
        """
        return self.pair(stages).idle

    def closeness(self, stages: tuple[str, ...]) -> Verdict:
        """Returns the verdict on stages as if they promised to be ``Close``."""
        verdict = self.pair(stages).closeness
        note_effects(stages, verdict)
        return verdict

    def _make_pair(self, stages: tuple[str, ...]) -> StagePair:
        return StagePair(self.baseline, stages)

    def _judge(self, stages: tuple[str, ...]) -> Verdict:
        """Runs the checks within the share of the budget that these stages have."""
        pair = self.pair(stages)
        sets = self.plan.judged_sets()
        share = self.coverage.share(sets, trained=pair.is_statistical)
        try:
            with self.coverage.limit.within(share):
                verdict = self._run_checks(pair)
        except OutOfTime as timeout:
            return self.coverage.verdict(pair, self.checks, timeout.partial)
        if not self.baseline.options.names_operators:
            return verdict
        with self.phase(f"{self._title(pair)}: searching the first diverging operator"):
            return name_operator(verdict, self.coverage.at_most(SECONDS))

    def _title(self, pair: StagePair) -> str:
        """Returns the name of a set of stages for the progress bar."""
        if pair.stages == self.baseline.active and len(pair.stages) > 1:
            return ALL
        return " + ".join(pair.stages)

    def _run_checks(self, pair: StagePair) -> Verdict:
        """Runs the checks one after the other; the first FAIL ends them."""
        self.coverage.begin(pair.stages)
        missed = ""
        try:
            for number, check in enumerate(self.checks):
                # An earlier set of stages may have changed the baseline.
                if culprits():
                    return uncomparable(pair.promise_name)
                if not check.applies(pair):
                    continue
                try:
                    with self.phase(f"{self._title(pair)}: {check.name}"):
                        verdict = check.run(pair, self.coverage)
                except OutOfTime:
                    # Without optional checks, the verdict is valid and has a remark.
                    remaining = [
                        each for each in self.checks[number:] if each.applies(pair)
                    ]
                    if not all(each.is_optional for each in remaining):
                        raise
                    names = ", ".join(each.name for each in remaining)
                    missed = f"; the budget had no room for {names}"
                    break
                pair.results.append((check, verdict))
                note_effects(pair.stages, verdict)
                if verdict.outcome is Outcome.FAIL:
                    break
        except BuildError as error:
            return Verdict(Outcome.FAIL, pair.promise_name, str(error))
        except StepError as error:
            # An error of the candidate alone is a verdict of the check.
            summary = f"it cannot be compared: the baseline raises {error}"
            return Verdict(Outcome.INCONCLUSIVE, pair.promise_name, summary)
        except (torch.OutOfMemoryError, MemoryError) as error:
            summary = f"it cannot be compared: {str(error) or type(error).__name__}"
            return Verdict(Outcome.INCONCLUSIVE, pair.promise_name, summary)
        if culprits() not in ((), pair.stages):
            return uncomparable(pair.promise_name)
        return conclude(pair, missed, tuple(check.name for check in self.checks))
