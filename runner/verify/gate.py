"""Whether the stages of a recipe are harmless: each alone, and all together."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import torch

from runner.child.spawn import may_fork
from runner.compare.close import close
from runner.compare.fingerprints import WHOLE_PROCESS
from runner.compare.horizon import APART, LongRun, long_run, same_algebra, same_bits
from runner.compare.isolation import StepError, Update
from runner.compare.states import clones
from runner.plugin.contract import Contract, Statistical
from runner.plugin.registry import Registry
from runner.plugin.source import State
from runner.proof import Build, Close, Exact, Outcome, Verdict, exact, health, verify, worst
from runner.recipe.recipe import Recipe
from runner.system.errors import DivergedError, RunnerError
from runner.train.assemble import Assembly, resolve_device
from runner.train.stage_watch import StageReport
from runner.verify.coverage import LONG_RUN, Coverage, with_exclusion
from runner.verify.drawing import Drawing, draws, same_draws, same_when_resumed
from runner.verify.options import Options
from runner.verify.patches import belongings, changed_since, files_of, patches
from runner.verify.reach import Reach
from runner.verify.statistical import affordable, part_of, seeds_of, statistical
from runner.verify.subjects import BuildError, baseline_step, built, course, recipe_with, recorded, remarks, subject
from runner.verify.surroundings import answers, evaluated, evaluations, questions, same_answers, same_evaluations
from runner.verify.time_limit import NOT_BEGUN, OutOfTime
from runner.verify.trainings import TrainingOrder, Trainings, training_order
from runner.verify.variants import ALL, beyond_updates, required, variants_of, weakest
from runner.verify.verification import FAILED, Verification, judged

_SHOWN = 5  # lines that never ran
_FEW = 3  # updates that show whether it is worth looking at all of them
_AMONG = 3  # updates: all but the last come between two evaluations
_DRAWING = 0.2  # of the seconds of a long run, in which what is drawn is compared
_LATE = (0.5, 0.95, 1.0)  # how far a training is in further updates: rates and other coefficients depend on it


def verify_recipe(recipe: Recipe, registry: Registry, options: Options, say: Callable[[str], None]) -> Verification:
    """Compares every active stage alone, with what it requires, and the whole recipe with the baseline."""
    started, device = time.perf_counter(), resolve_device(recipe.device)
    possible, gate = variants_of(recipe, device, ("alone", "all")), Gate(recipe, registry, options, say)
    with gate.trainings.ahead(device, gate.begin):
        report = judged(recipe, possible, options.stages, gate, say)
    return replace(report, seconds=time.perf_counter() - started)


class Gate:
    """Judges sets of stages of one recipe."""

    _spoilt: ClassVar[tuple[str, ...]] = ()
    """The stages that have changed something for the whole process, after which nobody can compare anything in it."""

    def __init__(self, recipe: Recipe, registry: Registry, options: Options, say: Callable[[str], None]) -> None:
        self.recipe, self.registry, self.options = recipe, registry, options
        device = resolve_device(recipe.device)
        compiles = device.type == "cpu" and any(face.traces for face in recipe.stages.values())
        self._coverage = Coverage(options.budget)
        self._length = options.steps or recipe.length[1]  # of a training, unless the budget has no room for it
        every = self._length if options.steps else part_of(self._length)
        forked = may_fork(recipe.device, torch.cuda.is_available())
        self.trainings = Trainings(registry.files, options.budget, self._length, every, say, compiles, forked)
        self._before, self._steps = belongings(), options.steps  # None until the budget is known to have room for them
        self._verdict, self._as_close = cache(self._judged), cache(self._judged_as_close)
        self._reach, self._training = cache(self._reach_of), cache(self._training_of)
        self._evaluated = cache(
            lambda in_float64: evaluated(answers(recipe, registry, ()), self._evaluations, in_float64)
        )
        self._reports: dict[tuple[str, ...], list[StageReport]] = defaultdict(list)
        """What became of the stages in the pipelines that were built, by what was judged."""
        self._undeclared: dict[str, list[str]] = {}
        """Slots that a stage takes hold of although its settings do not say so."""

    def __call__(self, stages: Sequence[str]) -> Verdict:
        """The verdict on a set of stages, by the weakest of their contracts."""
        return self._verdict(tuple(stages))

    def _judged(self, stages: tuple[str, ...]) -> Verdict:
        """The verdict on a set of stages within its share of the budget."""
        share = self._coverage.share(self._asked, trained=self._is_statistical(stages))
        try:
            with self._coverage.limit.within(share):
                return self._judged_in_time(stages)
        except OutOfTime as over:
            return self._coverage.verdict(stages, type(weakest(self.recipe, stages)).__name__, over.partial)

    def _judged_in_time(self, stages: tuple[str, ...]) -> Verdict:
        self._coverage.begin(stages, "updates")
        try:
            verdict = None if self._spoilt else self._judge(stages)
            if verdict is None or self._spoilt not in ((), stages):  # by what was judged before, or for this verdict
                by = " + ".join(self._spoilt)
                summary = f"{by} has changed something for the whole process: verify it by itself"
                return Verdict(Outcome.INCONCLUSIVE, type(weakest(self.recipe, stages)).__name__, summary)
            verdict = self._with_surroundings(stages, verdict)
        except BuildError as error:
            return Verdict(Outcome.FAIL, type(weakest(self.recipe, stages)).__name__, str(error))
        except (StepError, torch.OutOfMemoryError, MemoryError) as error:
            summary = f"it cannot be compared: {str(error) or type(error).__name__}"
            verdict = Verdict(Outcome.INCONCLUSIVE, type(weakest(self.recipe, stages)).__name__, summary)
        if WHOLE_PROCESS in verdict.evidence.get("contract", verdict.evidence):
            Gate._spoilt = stages
        if verdict.outcome is Outcome.FAIL:
            notes = remarks(self._reports[stages], self.recipe, self.registry, self._batches)
            verdict = replace(verdict, summary="; ".join([verdict.summary, *notes]))
        idle = self.idle(stages)
        if stages and set(stages) <= idle.keys() and verdict.outcome is not Outcome.FAIL:
            summary = "; ".join(f"{kind} is inactive: {reason}" for kind, reason in idle.items())
            return replace(verdict, outcome=Outcome.INCONCLUSIVE, summary=summary)
        missed = self._reach(stages).missed()
        if verdict and missed and verdict.contract != "Statistical":  # whose trainings are elsewhere, and longer
            more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
            summary = f"{verdict.summary}; not judged, as it never ran: {', '.join(missed[:_SHOWN])}{more}"
            return replace(verdict, summary=summary, evidence=verdict.evidence | {"never_ran": missed})
        return verdict

    def _reach_of(self, stages: tuple[str, ...]) -> Reach:
        """What ran of the code of a stage that is judged alone; nothing is watched where a compiler traces."""
        kinds = [] if any(self.recipe.stages[kind].traces for kind in stages) else self._alone(stages)
        return Reach(self.recipe.stages[kind].implementation() for kind in kinds)

    def _alone(self, stages: tuple[str, ...]) -> tuple[str, ...]:
        """The stage that is judged, if it is one, and the rest is what it requires."""
        kinds = [kind for kind in stages if kind in self.recipe.stages]
        return tuple(kind for kind in kinds if {kind, *required(self.recipe.stages, kind)} == {*stages})[:1]

    def _with_surroundings(self, stages: tuple[str, ...], verdict: Verdict) -> Verdict:
        """The verdict on updates, unless something around them is worse."""
        promised, settings = weakest(self.recipe, stages), verdict.evidence.get("contract", {}).get("settings", {})
        settings = settings or {name: (*map(repr, each),) for name, each in self._reach(stages).settings.items()}
        if settings and verdict and not isinstance(promised, Statistical):
            name, (own, other) = next(iter(settings.items()))
            summary = f"it makes torch's {name} {other} ({own} before), which can change numbers: promise Statistical"
            verdict = replace(verdict, outcome=Outcome.INCONCLUSIVE, summary=summary)
        found, contract = [verdict], Close() if verdict.contract == "Close" else promised
        try:
            for more in self._around(stages, contract) if verdict.outcome is not Outcome.FAIL else ():
                found.append(more)
                if worst([more.outcome, verdict.outcome]) is not verdict.outcome:
                    verdict = replace(more, contract=verdict.contract)
                if verdict.outcome is Outcome.FAIL:  # nothing further is asked
                    break
        except OutOfTime:  # the long run excludes rarer errors, and a verdict without it says how rare they may be
            if self._coverage.current(stages) != LONG_RUN:
                raise
            verdict = replace(verdict, summary=f"{verdict.summary}; the budget had no room for a long run")
        few = len(self._batches) if not isinstance(contract, Statistical) else 0
        return with_exclusion(verdict, found, few, isinstance(contract, Exact))

    def _around(self, stages: tuple[str, ...], contract: Contract) -> Iterator[Verdict]:
        """What can be said about all but the updates, one after the other; nothing of stages that do nothing."""
        if self._is_idle(stages):
            return
        for kind, slot in ((each, slot) for each in stages for slot in self._undeclared.get(each, ())):
            summary = f"'{kind}' takes hold of the slot '{slot}', which its settings do not declare (wraps, claims)"
            yield Verdict(Outcome.FAIL, type(contract).__name__, summary)
        faces = [type(self.recipe.stages[kind]) for kind in stages if kind in self.recipe.stages]
        for name in (*patches({*map(str, self.registry.files), *files_of(faces)}), *changed_since(self._before)):
            Gate._spoilt = stages
            summary = f"the change reaches the baseline, too: {name} is another one for the whole process"
            yield Verdict(Outcome.FAIL, type(contract).__name__, summary)
        self._coverage.begin(stages, "predictions")
        baseline, changed = self._pair(answers, stages)
        yield same_answers(baseline, changed, self._questions, contract)
        self._coverage.begin(stages, "evaluations")
        if not isinstance(contract, Statistical):
            yield from same_evaluations(self._evaluated, baseline, changed, self._evaluations, contract)
        self._coverage.begin(stages, "sampled batches")
        yield from self._drawn(stages, contract)
        self._coverage.begin(stages, LONG_RUN)
        baseline, changed = self._subjects(stages)
        if not self.options.horizon or isinstance(contract, Statistical):
            return
        if isinstance(contract, Exact):
            found = same_bits(self._long_run, baseline, changed, range(1))
            yield found if found.outcome is not Outcome.FAIL else self._drawing(baseline, changed) and found
        else:
            updates = course(self.recipe, self.registry, self.options.horizon, APART)
            with closing(updates):
                yield same_algebra(baseline, changed, updates, self._coverage.at_most(self.options.horizon_seconds))

    def _drawn(self, stages: tuple[str, ...], contract: Contract) -> Iterator[Verdict]:
        """What can be said about what updates learn from, also after the training was interrupted."""
        if any(self.recipe.stages[kind].prepares for kind in stages if kind in self.recipe.stages):
            return
        options, length = self.options, Drawing(self.options.updates)
        if isinstance(contract, Close):  # the long run of what is exact draws by itself
            length = Drawing(
                options.updates, options.horizon, _DRAWING * self._coverage.at_most(self.options.horizon_seconds)
            )
        yield same_draws(*self._pair(draws, stages), contract, length)
        self._coverage.begin(stages, "a resumed training")
        baseline, changed = (partial(self._resumed, kinds) for kinds in ((), stages))
        yield same_when_resumed(baseline, changed, contract, options.updates)

    def _resumed(self, stages: tuple[str, ...], checkpoint: State | None) -> Build:
        return self._build(partial(draws, resumed=checkpoint), stages)

    @cached_property
    def _long_run(self) -> LongRun:
        build = subject(self.recipe, self.registry, ())
        return long_run(build, range(1), self.options.horizon, self._coverage.at_most(self.options.horizon_seconds))

    @cached_property
    def _questions(self) -> list[Update]:
        """For a model that has learnt a little."""
        with baseline_step(self.recipe, self.registry) as step:
            for _ in range(self.options.updates):
                step(step.next())
            batches = [self._batches[0].batch, self._batches[1].batch]
            return questions(step.pipeline, batches, clones(step.learner.complete_state()))

    @cached_property
    def _evaluations(self) -> list[Update]:
        return evaluations(self._questions[0].states, self._batches[: self.options.updates][-_AMONG:])

    def idle(self, stages: tuple[str, ...]) -> dict[str, str]:
        """Which of the stages that were judged together had nothing to do, with the reason."""
        reason, found = "nothing of it is called once the pipeline is built", self._inactive(stages)
        return {kind: reason for kind in self._alone(stages) if self._reach(stages).is_idle} | found

    def _inactive(self, stages: tuple[str, ...]) -> dict[str, str]:
        return {report.kind: str(report.reason) for report in self._reports[stages] if not report.active}

    def _is_idle(self, stages: tuple[str, ...]) -> bool:
        """Whether the pipeline says so of all of them; another part of it may still call them."""
        return bool(stages) and set(stages) <= self._inactive(stages).keys()

    def _subjects(self, stages: tuple[str, ...]) -> tuple[Build, Build]:
        """The baseline and the recipe with these stages."""

        def note(built: Assembly) -> None:
            self._reports[stages] += built.reports.values()
            self._undeclared |= built.undeclared

        return self._pair(partial(subject, built=note), stages)

    def _pair(
        self, make: Callable[[Recipe, Registry, Collection[str]], Build], stages: tuple[str, ...]
    ) -> tuple[Build, Build]:
        """What is made of the baseline, and of the recipe with these stages, whose code is watched."""
        return make(self.recipe, self.registry, ()), self._build(make, stages)

    def _build(self, make: Callable[[Recipe, Registry, Collection[str]], Build], stages: tuple[str, ...]) -> Build:
        return built(self._reach(stages).watched(make(self.recipe, self.registry, stages)))

    def _judge(self, stages: tuple[str, ...]) -> Verdict:
        contract = weakest(self.recipe, stages)
        baseline, changed = self._subjects(stages)
        if isinstance(contract, Exact):
            same = verify(baseline, changed, self._batches, contract)
            return same if not same or self.options.horizon else self._drawing(baseline, changed) and same
        elsewhere = beyond_updates(self.recipe, stages)
        if isinstance(contract, Close) and elsewhere and self.recipe.stages[elsewhere].prepares:
            summary = f"{elsewhere} changes what batches are drawn, which promises Exact or Statistical if anything"
            return Verdict(Outcome.INCONCLUSIVE, "Close", summary)
        if isinstance(contract, Close):
            return self._as_close(stages)
        if not elsewhere and (more := self._as_close(stages)):
            summary = f"nothing is lost but rounding, which needs no training to see: {more.summary}"
            return replace(more, summary=summary)
        healthy = health(changed, self._batches, baseline)
        return self._statistical(stages) if healthy and not self._is_idle(stages) else healthy

    def _drawing(self, baseline: Build, changed: Build) -> Verdict:
        """The verdict on updates with batches of their own, so that stages that fetch them are judged, too."""
        return exact(baseline, changed, range(self.options.updates))

    def _judged_as_close(self, stages: tuple[str, ...]) -> Verdict:
        """The verdict on stages that promise to be Close, or would if they were asked."""
        subjects = self._subjects(stages)
        if self._is_statistical(stages):  # what loses something mostly does so at once
            first = close(*subjects, self._batches[:_FEW])
            if first.outcome is Outcome.FAIL and WHOLE_PROCESS not in first.evidence:
                return first
        verdict = verify(*subjects, self._batches, Close())
        if WHOLE_PROCESS in verdict.evidence["contract"]:
            Gate._spoilt = stages
        return verdict

    @cached_property
    def _batches(self) -> list[Any]:
        return recorded(self.recipe, self.registry, self.options.updates, _LATE)

    def _statistical(self, stages: Sequence[str]) -> Verdict:
        objective = self.recipe.objective
        if objective is None:
            data, model = self.recipe.data.kind, self.recipe.model.kind
            summary = f"neither data '{data}' nor model '{model}' names an objective by which to compare trainings"
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", summary)
        if self._steps is None and self.trainings.seconds_left < 0:
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", self._coverage.not_begun)
        changed, unit = self._beside(self._equal, stages), self.recipe.length[0]
        pair, seeds = (self._training(self._equal), self._training(changed)), self.options.seeds
        for others in filter(self._keeps, self._asked):  # beside trainings that were begun, which get all cores then
            self(others)
        if self._spoilt:  # by one of them
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", self._coverage.not_begun)
        try:
            with self.trainings.beside(0):
                if self._steps is None:
                    changes = self._changes(self._equal)
                    self._steps = affordable(*pair, unit, seeds, changes, self.trainings)
                    self.trainings.end_at(self._steps)
                verdict = statistical(*pair, self._steps, objective, self.trainings, seeds)
                self.trainings.give_up()  # what was begun beyond those that were needed
        except DivergedError as error:
            return Verdict(Outcome.FAIL, "Statistical", f"a training with it diverged: {error}")
        except RunnerError as error:
            return Verdict(Outcome.INCONCLUSIVE, "Statistical", str(error), {FAILED: str(error)})
        if verdict.summary == NOT_BEGUN:
            verdict = replace(verdict, summary=self._coverage.not_begun)
        trained = {"stages": {"reference": self._equal, "changed": changed}, "length": {unit: self._steps}}
        whole = self.recipe.length[1]
        shorter = f", after {self._steps:,} of {whole:,} {unit}" if self._steps < whole else ""
        return replace(verdict, summary=verdict.summary + shorter, evidence=verdict.evidence | trained)

    @cached_property
    def _equal(self) -> tuple[str, ...]:
        """What is equal to the baseline up to rounding.

        It may stand for the baseline, and be beside a change as well: trainings take a fraction of the time, and those
        of a stage and of the whole recipe are often the same. Nothing may, if they are equal alone but not together.
        """
        alone = {kind: required(self.recipe.stages, kind) | {kind} for kind in self._active}
        found = tuple(kind for kind, needed in alone.items() if self._keeps(needed))
        return found if self._keeps(found) else ()

    def _beside(self, equal: Collection[str], stages: Collection[str]) -> tuple[str, ...]:
        """Stages that are judged by trainings, and those that stand for the baseline."""
        return tuple(kind for kind in self._active if kind in stages or kind in equal)

    def _changes(self, equal: Collection[str]) -> int:
        """How many sets of stages are compared with the reference in trainings."""
        beside = {self._beside(equal, stages) for stages in self._asked}
        return sum(isinstance(weakest(self.recipe, {*kinds} - {*equal}), Statistical) for kinds in beside)

    @property
    def _asked(self) -> Iterator[tuple[str, ...]]:
        """The sets of stages that are to be judged."""
        for kind in self.options.stages or (*self._active, ALL):
            if kind == ALL or kind in self._active:
                needed = self._active if kind == ALL else {kind, *required(self.recipe.stages, kind)}
                yield tuple(each for each in self._active if each in needed)

    @cached_property
    def _active(self) -> tuple[str, ...]:
        """The recipe's stages that have something to do here."""
        found = variants_of(self.recipe, resolve_device(self.recipe.device))
        return tuple(kind for kind in self.recipe.stages if kind not in found.inactive)

    def _keeps(self, kinds: Collection[str]) -> bool:
        """Whether stages were seen to lose nothing but rounding."""
        stages = tuple(each for each in self._active if each in kinds)
        if isinstance(weakest(self.recipe, stages), Statistical):
            return beyond_updates(self.recipe, stages) is None and bool(self._as_close(stages))
        return bool(self(stages))

    def begin(self) -> bool:
        """Begins with trainings, if some will be needed; equal is, until more is known, what promises it."""
        if self.recipe.objective is None or self.trainings.seconds_left < 0:
            return False
        try:
            with self._coverage.beginning():
                asked = (each for each in self._asked if self._is_statistical(each))
                stages = next((each for each in asked if not self._keeps(each)), None)
                alone = {kind: required(self.recipe.stages, kind) | {kind} for kind in self._active}
                equal = [kind for kind, each in alone.items() if not self._is_statistical(each) or self._keeps(each)]
        except (BuildError, StepError, torch.OutOfMemoryError, MemoryError, OutOfTime):
            return False
        if stages is None:
            return False
        orders = [self._training(self._beside(equal, kinds)) for kinds in ((), stages)]
        self.trainings.begin(orders, seeds_of(orders[0], self.options.seeds))
        return True

    def _is_statistical(self, kinds: Collection[str]) -> bool:
        return isinstance(weakest(self.recipe, kinds), Statistical)

    def _training_of(self, kinds: tuple[str, ...]) -> TrainingOrder:
        """A training with these stages, its batch size chosen already."""
        return training_order(recipe_with(self.recipe, self.registry, kinds), self.registry, kinds, self._length)
