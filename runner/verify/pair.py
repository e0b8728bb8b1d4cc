"""A baseline and a candidate: one recipe without its stages, and with some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from runner.plugin.check import Check
from runner.plugin.contract import Close, Contract, Exact, Statistical
from runner.plugin.implementation import implementation_of
from runner.plugin.registry import Registry
from runner.proof.close_check import close
from runner.proof.exact_check import exact
from runner.proof.fingerprints import WHOLE_PROCESS
from runner.proof.subject import Build
from runner.proof.verdict import Outcome, Verdict
from runner.proof.verify_subjects import compare
from runner.recipe.recipe import Recipe
from runner.training.pipeline import Assembly
from runner.training.stage_watch import StageReport
from runner.verify.stage_coverage import CodeCoverage
from runner.verify.subjects import built, subject
from runner.verify.variants import required, weakest

if TYPE_CHECKING:
    from runner.verify.baseline import Baseline

MakeBuild = Callable[[Recipe, Registry, Collection[str]], Build]
_FIRST_UPDATES = 3
"""Updates that show whether it is worth comparing all of them."""


class StagePair:
    """The baseline and the candidate with one set of stages, and results on both.

    Args:
        baseline: Shared by all pairs of a recipe.
        stages: Kinds of the stages of the candidate, in their order.
    """

    def __init__(self, baseline: Baseline, stages: tuple[str, ...]) -> None:
        self.baseline = baseline
        self.recipe = baseline.recipe
        self.registry = baseline.registry
        self.options = baseline.options
        self.stages = stages
        self.promised = weakest(baseline.recipe, stages)
        self.results: list[tuple[Check, Verdict]] = []
        """The checks that were run, in their order."""
        self.reports: list[StageReport] = []
        """Reports on the stages of the pipelines that were built."""
        self.undeclared: dict[str, list[str]] = {}
        """Slots that a stage attaches to although its config does not declare them, by
        stage.
        """

    @property
    def promise_name(self) -> str:
        """The name of the promised contract."""
        return type(self.promised).__name__

    @property
    def contract(self) -> Contract:
        """The contract to check: ``Close`` for ``Statistical`` stages that are close."""
        # Statistical stages that are close need no trainings.
        is_close = bool(self.results) and self.results[0][1].contract == "Close"
        return Close() if is_close else self.promised

    @property
    def is_statistical(self) -> bool:
        """Returns whether only trainings can prove the promise of the stages."""
        return isinstance(self.promised, Statistical)

    @property
    def chooses_batches(self) -> bool:
        """Returns whether a stage changes the batches before anything is built,
        so that none can be compared.
        """
        stages = self.recipe.stages
        return any(stages[kind].prepares for kind in self.stages if kind in stages)

    @property
    def has_long_checks(self) -> bool:
        """Returns whether checks of many updates or batches apply: the stages promise
        numbers, and a long run is configured.
        """
        return self.has_long_run and isinstance(self.contract, Exact | Close)

    @property
    def has_long_run(self) -> bool:
        """Returns whether a long run is configured, and the stages have an effect."""
        return bool(self.options.horizon) and not self.is_inactive

    @property
    def batches(self) -> list[Any]:
        """Recorded batches of the baseline's first updates."""
        return self.baseline.batches

    def passed(self, summary: str) -> Verdict:
        """Returns a PASS of the promised contract."""
        return Verdict(Outcome.PASS, self.promise_name, summary)

    def failed(self, summary: str, evidence: dict[str, Any] | None = None) -> Verdict:
        """Returns a FAIL of the promised contract."""
        return Verdict(Outcome.FAIL, self.promise_name, summary, evidence or {})

    def subjects(self) -> tuple[Build, Build]:
        """Returns makers of the baseline's and the candidate's training."""

        def note(assembly: Assembly) -> None:
            self.reports += assembly.reports.values()
            self.undeclared |= assembly.undeclared

        return self.builds(partial(subject, built=note))

    def builds(self, make: MakeBuild) -> tuple[Build, Build]:
        """Returns makers of two subjects: of the baseline, and of the candidate, whose
        code is watched.
        """
        return make(self.recipe, self.registry, ()), self.candidate(make)

    def candidate(self, make: MakeBuild) -> Build:
        """Returns a maker of a subject of the candidate."""
        build = make(self.recipe, self.registry, self.stages)
        return built(self.code_coverage.watched(build))

    @cached_property
    def code_coverage(self) -> CodeCoverage:
        """Code of a stage that has run; empty if a compiler traces it, or for several
        stages.
        """
        # Traced code runs in the compiler.
        kinds = () if self.is_traced else self._single
        stages = self.recipe.stages
        return CodeCoverage(implementation_of(type(stages[kind])) for kind in kinds)

    @property
    def is_traced(self) -> bool:
        """Returns whether a compiler traces a stage, and compiles again for other
        shapes.
        """
        return any(self.recipe.stages[kind].traces for kind in self.stages)

    @property
    def _single(self) -> tuple[str, ...]:
        """The stage that is judged, if it requires all others."""
        stages = self.recipe.stages
        for kind in self.stages:
            if {kind, *required(stages, kind)} == {*self.stages}:
                return (kind,)
        return ()

    @property
    def idle(self) -> dict[str, str]:
        """Stages that did nothing, with the reason."""
        reason = "nothing of it is called once the pipeline is built"
        unused = {kind: reason for kind in self._single if self.code_coverage.is_idle}
        return unused | self._inactive

    @property
    def is_inactive(self) -> bool:
        """Returns whether every stage was inactive when the pipeline was built."""
        return bool(self.stages) and set(self.stages) <= self._inactive.keys()

    @property
    def _inactive(self) -> dict[str, str]:
        return {
            report.kind: str(report.reason)
            for report in self.reports
            if not report.active
        }

    @cached_property
    def closeness(self) -> Verdict:
        """The verdict on the stages as if they promised to be ``Close``."""
        subjects = self.subjects()
        # Most errors of such stages occur in the first updates.
        if self.is_statistical:
            first = close(*subjects, self.batches[:_FIRST_UPDATES])
            if first.outcome is Outcome.FAIL and WHOLE_PROCESS not in first.evidence:
                return first
        return compare(*subjects, self.batches, Close())

    def sampled_updates(self) -> Verdict:
        """Compares updates on freshly sampled batches, which covers stages that fetch
        batches.
        """
        return exact(*self.subjects(), range(self.options.updates))
