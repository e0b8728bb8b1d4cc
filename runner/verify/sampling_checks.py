"""Compares the batches and noise that are sampled for updates, also in a training
that was interrupted and resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.plugin.context import Context
from runner.plugin.contract import Close, Contract, Statistical
from runner.plugin.implementation import imported
from runner.plugin.registry import Registry
from runner.plugin.source import Source, State
from runner.proof.difference import digest
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build, Stateful, Subject
from runner.proof.trajectory import Trajectory
from runner.proof.trees import leaves
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import CheckpointError, RunnerError
from runner.training import evaluation
from runner.training.checkpoint import kept
from runner.training.packing import UnpackableError
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.step import Step
from runner.verify.generator_states import (
    MOST_IN_ADVANCE,
    GeneratorStates,
    without_generators,
)
from runner.verify.likeness import CONTENT, describe, is_output, unlike
from runner.verify.subjects import (
    BuildError,
    LearnerState,
    generator_states,
    recipe_with,
)
from runner.verify.unexercised import NOT_EXERCISED

CHECKPOINT = object()
REHEARSAL = object()
EVALUATION = object()
"""Special inputs of the step of ``draws``."""

RESUMED_UPDATES = 4
"""Updates of a resumed training that are compared."""
OBSERVED = (3, 4, 4)
"""Updates of a training before its first evaluation, between both, and afterwards."""
_EARLY = 3
"""Updates after a start, or a copy of the state, in which samples must be the same."""
_UPDATES_TO_PROGRESS = 1000
"""Updates in which the progress of every training changes."""
_SHORT_EPOCH = 100
"""Updates of an epoch after which a training may as well be interrupted."""
_PROGRESS = "progress"
"""Key of the progress in the result of ``draws``, before what rounding may change."""
_ROUNDING = MOST_ULPS * torch.finfo(torch.float32).eps
"""Allowed difference of an element, relative to the largest one."""
_ELEMENTS = 0.05
"""Share of elements that may differ by more in the first updates."""
_EXCUSED_COUNT = 2
_EXCUSED_SHARE = 0.1
"""Limits of deviating samples: their number, and their share of updates."""


def draws(
    recipe: Recipe,
    registry: Registry,
    stages: Collection[str],
    resumed: State | None = None,
    change: Callable[[Source], None] | None = None,
) -> Build:
    """Creates subjects whose step trains on batches of their source, and returns
    the batch and the result.

    For the input ``CHECKPOINT``, the step trains to the next possible interruption and
    returns a checkpoint; subjects that were created with it continue from there. For
    ``REHEARSAL``, it predicts as in an evaluation; for ``EVALUATION``, it evaluates and
    returns the metrics.

    Args:
        recipe: The recipe.
        registry: The plugins.
        stages: Kinds of stages.
        resumed: The checkpoint.
        change: Changes the data of the source before learner and stages are made.
    """
    staged = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = _assembled(staged, registry, resumed, change)
        if resumed is not None:
            pipeline.load_state_dict(resumed["pipeline"])
            generators.load_state_dict(resumed["generators"])
        step = Step(pipeline)

        def draw(request: Any) -> dict[str, Any]:
            if request is CHECKPOINT:
                return _interrupted(step)
            if request is REHEARSAL:
                return pipeline.source.rehearse(pipeline.learner, step.batch) or {}
            if request is EVALUATION:
                return {"metrics": evaluation.evaluated(pipeline)}
            return _train(step)

        state: dict[str, Stateful] = {"learner": LearnerState(step)}
        if depends_on_learner(pipeline.source):
            state["pipeline"] = _StateWithoutLearner(step)
        return Subject(draw, state, seed=step.seed)

    return build


def _assembled(
    recipe: Recipe,
    registry: Registry,
    resumed: State | None,
    change: Callable[[Source], None] | None,
) -> Assembly:
    if change is None:
        return assemble(recipe, registry.files, resumed=resumed and resumed["pipeline"])
    implementation = imported(recipe.data)

    # The data must change before learner and stages read them.
    def build_source(config: Any, context: Context) -> Source:
        source: Source = implementation(config, context)
        change(source)
        return source

    device = resolve_device(recipe.device)
    size = recipe.train.batch_size
    return Assembly(recipe, registry.files, device, size, None, build_source)


def _train(step: Step) -> dict[str, Any]:
    """Performs an update; returns its sample and its results."""
    sample = step.next()
    # The update changes the counts.
    progress = dict(vars(step.progress))
    output = step(sample)

    pipeline = step.pipeline
    states = generator_states(pipeline)
    statistics = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in pipeline.source.statistics().items()
    }
    return {
        _PROGRESS: progress,
        "batch": sample.batch,
        "noise": sample.noise,
        "generators": states,
        "output": output,
        "statistics": statistics,
    }


def depends_on_learner(source: Source) -> bool:
    """Returns whether the samples of a source may depend on what was learned, and
    thus on rounding errors.
    """
    methods = ((source.bind, Source.bind), (source.feedback, Source.feedback))
    return any(
        getattr(bound, "__func__", None) is not method for bound, method in methods
    )


def _interrupted(step: Step) -> State:
    """Returns a checkpoint from the position where a training would write the next one;
    stages write their final remarks.

    It is in the second epoch, if the first is short: samples then depend on earlier
    ones.
    """
    pipeline = step.pipeline
    start = step.progress.position
    epoch_samples = step.progress.epoch_samples or 0
    is_short = epoch_samples <= _SHORT_EPOCH * pipeline.batch_size
    least_samples = epoch_samples if is_short else 0
    for _ in range(_UPDATES_TO_PROGRESS):
        step()
        if step.progress.position != start and step.progress.samples > least_samples:
            break
    else:
        raise RuntimeError(
            f"after {_UPDATES_TO_PROGRESS} more updates, "
            "the progress of the training has not changed"
        )
    for stage in pipeline.stages.values():
        stage.closing_notes()
    return kept(
        {"pipeline": pipeline.state_dict(), "generators": generators.state_dict()}
    )


class _StateWithoutLearner:
    """State that determines the next samples, except the learner; stages restart."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.state_dict = step.pipeline.state_dict

    def load_state_dict(self, state: State) -> None:
        """Restores the state that ``state_dict`` of another pipeline returned."""
        current = self.step.pipeline.state_dict()
        # Stages of a candidate have no counterpart in the baseline.
        unchanged = {name: current[name] for name in ("learner", "stages")}
        self.step.pipeline.load_state_dict(state | unchanged)
        self.step.reset()


class ComparisonLength(NamedTuple):
    """The length of a comparison of samples.

    Attributes:
        updates: Updates that are compared in any case.
        most: Updates that are compared if they fit into the time.
        seconds: The time, for all updates.
    """

    updates: int
    most: int = 0
    seconds: float = 0.0


def same_draws(
    baseline: Build, changed: Build, contract: Contract, length: ComparisonLength
) -> Verdict:
    """Returns whether both sample the same for an update after learning the same, and
    use the same number of random numbers.

    The first updates must also return nearly the same results, because their batches
    passed through the stage; and predictions are requested at times. Where a source
    depends on its learner, a ``Close`` stage starts every update with the baseline's
    state, because rounding errors would lead to other batches. Such a source may still
    sample something else at times, and then receives all state that determines samples
    (``_Deviations``). Where the stage promises neither bits nor algebra, only the form
    of batches is compared.
    """
    name = type(contract).__name__
    deadline = time.monotonic() + length.seconds
    try:
        isolations = Isolation(baseline, 0), Isolation(changed, 0)
        comparison = _SampleComparison(*isolations, contract, length)
        unexcused = comparison.find_unexcused(deadline)
    except StepError as error:
        return error.verdict(name, baseline)
    if unexcused is not None:
        trajectory = Trajectory(unexcused.update * [None], 0)
        reproduction = Reproduction(
            baseline, changed, trajectory, unexcused.update, "Close"
        )
        return Verdict(Outcome.FAIL, name, unexcused.summary, reproduction=reproduction)
    deviations = comparison.deviations
    summary = f"the same is drawn for {deviations.updates:,} updates"
    return Verdict(Outcome.PASS, name, summary, {"drawn": deviations.excluded()})


class _Deviation(NamedTuple):
    """A value that differs from the baseline's.

    Attributes:
        update: Number of the update.
        location: Location of the value.
        expected: Samples and results of the baseline.
        actual: The candidate's.
    """

    update: int
    location: Location
    expected: Frame
    actual: Frame

    @property
    def summary(self) -> str:
        """Returns the message for the user."""
        difference = describe(self.update, self.location, self.expected, self.actual)
        if is_output(self.location.name):
            return f"the result of an update is not the same: {difference}"
        difference = replace(difference, slot="next_batch")
        return f"the sample is not the same: {difference}"


class _SampleComparison:
    """Compares the samples of two trainings, update by update."""

    def __init__(
        self,
        reference: Isolation,
        candidate: Isolation,
        contract: Contract,
        length: ComparisonLength,
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self.length = length
        self.is_form = isinstance(contract, Statistical)
        has_learner = "pipeline" in reference.subject.state
        self.content = CONTENT if has_learner else _ROUNDING
        self.copies_state = has_learner and isinstance(contract, Close)
        """Whether the candidate starts every update with the baseline's state."""
        self.deviations = _Deviations(length.updates)
        self.generators = GeneratorStates()

    def find_unexcused(self, deadline: float) -> _Deviation | None:
        """Returns the first deviation that rounding cannot explain."""
        for update in range(1, max(self.length.updates, self.length.most) + 1):
            if update > self.length.updates and time.monotonic() >= deadline:
                break
            # Rounding errors accumulate, so only early results are nearly the same.
            has_output = update <= _EARLY and not self.is_form
            expected = _advanced(self.reference, output=has_output)
            actual = _advanced(self.candidate, output=has_output)
            location = self._compare(update, expected, actual)
            if location is not None:
                return _Deviation(update, location, expected, actual)
            # A prediction must not change what is sampled afterwards.
            if update in (1, self.length.updates) and not self.is_form:
                for isolation in (self.reference, self.candidate):
                    isolation.advance([REHEARSAL], lambda _: None)

        self._catch_up(update)
        if self.generators.first_ahead is None:
            return None
        return _Deviation(update, self.generators.first_ahead, expected, actual)

    def _compare(self, update: int, expected: Frame, actual: Frame) -> Location | None:
        """Returns the location of a deviation without excuse; prepares the candidate
        for the next update if there is none.
        """
        samples = without_generators(expected), without_generators(actual)
        differ = partial(unlike, *samples, self.is_form, self.content, rounded=True)
        location = differ()
        is_large = location is not None and differ(share=_ELEMENTS) is not None
        # The baseline's states are needed also where the sample differs.
        overdue = self.generators.add(update, expected, actual)
        if location is None:
            location = overdue
            is_large = overdue is not None
        self.deviations.count(is_deviation=location is not None)
        if location is not None and not self._is_excused(location, is_large):
            return location
        if self.copies_state:
            self._copy_state("learner")
            if self.deviations.is_over(is_large=is_large):
                self._copy_state("pipeline")
                self.generators.forget()
        return None

    def _is_excused(self, location: Location, is_large: bool) -> bool:
        # Rounding changes no count.
        if location.name.startswith(f"{_PROGRESS}.") or not self.copies_state:
            return False
        return self.deviations.is_excused(is_large=is_large)

    def _copy_state(self, name: str) -> None:
        state = self.reference.subject.state[name].state_dict()
        self.candidate.load({name: state})

    def _catch_up(self, update: int) -> None:
        """Advances the baseline to the generators of a candidate that samples in
        advance.
        """
        for later in range(update + 1, update + MOST_IN_ADVANCE + 1):
            if self.generators.first_ahead is None:
                break
            frame = _advanced(self.reference)
            self.generators.add(later, frame, frame)


class _Deviations:
    """Excuses deviations of a source that depends on its learner, which rounding errors
    can cause: first of a few elements, then of more.

    Large deviations are not excused directly after the state that determines samples
    was copied, nor are frequent ones.

    Args:
        steady: Number of initial updates in which samples must be the same except for
            a few elements.
    """

    def __init__(self, steady: int) -> None:
        self.steady = steady
        self.updates = 0
        self._count = 0
        self._copied_at = 0
        self._deviates_since = 0

    def count(self, *, is_deviation: bool) -> None:
        """Counts an update, and whether its sample deviates."""
        self.updates += 1
        # All deviations until the next copy of the state have the same cause.
        if is_deviation and not self._deviates_since:
            self._deviates_since = self.updates
            self._count += 1

    def is_excused(self, *, is_large: bool) -> bool:
        """Returns whether rounding may explain the last update."""
        is_early = self.updates <= max(self.steady, self._copied_at + _EARLY)
        if is_large and is_early:
            return False
        return self._count <= _EXCUSED_COUNT + _EXCUSED_SHARE * self.updates

    def is_over(self, *, is_large: bool) -> bool:
        """Returns whether the state that determines samples must be copied now,
        and resets the count.
        """
        is_long = self.updates >= self._deviates_since + _EARLY
        if not is_large and not (self._deviates_since and is_long):
            return False
        self._copied_at = self.updates
        self._deviates_since = 0
        return True

    def excluded(self) -> int:
        """Returns the number of updates without deviation that would exclude the same
        error rate: by Poisson's upper bound.
        """
        # The import is slow, and only a PASS needs it.
        from scipy.special import chdtri

        bound = chdtri(2 * self._count + 2, 0.05)
        return int(self.updates * chdtri(2, 0.05) / bound)


def _advanced(isolation: Isolation, *, output: bool = False) -> Frame:
    """Returns the samples of the next update, and its results if ``output`` is set."""
    (values,) = isolation.advance([None], lambda result: dict(leaves(result)))
    return {
        Location(STEP, "output", path): value
        for path, value in values.items()
        if output or not is_output(path)
    }


def same_when_resumed(
    baseline: Callable[[State | None], Build],
    changed: Callable[[State | None], Build],
    contract: Contract,
    updates: int,
) -> Verdict:
    """Returns whether a training that is interrupted after ``updates`` and
    resumed equals one without interruption.

    Both arguments create subjects, from a checkpoint if one is given. Where a
    stage promises neither bits nor algebra, only the form is compared. With a baseline
    that cannot resume either, nothing is exercised.
    """
    name = type(contract).__name__
    is_form = isinstance(contract, Statistical)
    problem = _resuming_problem(changed, updates, is_form)
    if problem is None:
        summary = "a resumed training continues as if it had not been interrupted"
        return Verdict(Outcome.PASS, name, summary)
    baseline_problem = _resuming_problem(baseline, updates, is_form)
    if baseline_problem is None:
        return Verdict(Outcome.FAIL, name, problem)
    summary = (
        f"a resumed training was not compared: without the stage, {baseline_problem}"
    )
    reason = "a resumed training, because the baseline does not resume as it was"
    evidence = {NOT_EXERCISED: (reason,)}
    return Verdict(Outcome.PASS, name, summary, evidence=evidence)


def _resuming_problem(
    make: Callable[[State | None], Build], updates: int, is_form: bool
) -> str | None:
    """Returns the first difference in a resumed training; None without a difference."""
    try:
        isolation = Isolation(make(None), 0)
        isolation.advance(updates * [None], lambda _: None)
        (checkpoint,) = isolation.advance([CHECKPOINT], lambda state: state)
        resumed = Isolation(make(checkpoint), 0)
        # Updates are seeded by their number.
        resumed.updates = isolation.updates
        for update in range(1, RESUMED_UPDATES + 1):
            expected = _advanced(isolation, output=True)
            actual = _advanced(resumed, output=True)
            location = unlike(expected, actual, is_form)
            if location is not None:
                difference = describe(update, location, expected, actual)
                return f"a resumed training is another one: {difference}"
    except (StepError, BuildError, CheckpointError, UnpackableError) as error:
        return f"a training cannot be kept and resumed, or its end reported: {error}"
    return None


class Observation(NamedTuple):
    """A training with evaluations in it.

    Attributes:
        fingerprints: Fingerprints of the results of every update, and of the state at
            the end.
        metrics: Fingerprints of the results of every evaluation.
    """

    fingerprints: list[dict[str, bytes]]
    metrics: list[dict[str, bytes]]

    def first_difference(self, candidate: Observation) -> tuple[int, str] | None:
        """Returns the first update, from 1, and the name of a value that differs; None
        if no value does.
        """
        pairs = zip(self.fingerprints, candidate.fingerprints, strict=True)
        for number, (expected, actual) in enumerate(pairs, start=1):
            for name in dict.fromkeys((*expected, *actual)):
                if expected.get(name) != actual.get(name):
                    return number, name
        return None


def observe(build: Build) -> Observation:
    """Makes the ``OBSERVED`` updates, with an evaluation after each series but the last.

    Args:
        build: Made by ``draws``.
    """
    isolation = Isolation(build, 0)
    observation = Observation([], [])
    for number, count in enumerate(OBSERVED):
        if number:
            metrics = isolation.advance([EVALUATION], _fingerprints)
            observation.metrics.extend(metrics)
        results = isolation.advance([None] * count, _fingerprints)
        observation.fingerprints.extend(results)
    # An update may change a state that none of these results shows.
    state = {
        str(location): digest(value) for location, value in isolation.initial().items()
    }
    observation.fingerprints.append(state)
    return observation


def observe_or_message(build: Build) -> Observation | str:
    """Returns the training; a message if it fails."""
    try:
        return observe(build)
    except (StepError, RunnerError) as error:
        return str(error)


def _fingerprints(result: Any) -> dict[str, bytes]:
    return {path: digest(value) for path, value in leaves(result)}


def evaluate(isolation: Isolation) -> dict[str, Any]:
    """Returns the metrics of a subject of ``draws``."""
    (metrics,) = isolation.advance([EVALUATION], lambda result: dict(result["metrics"]))
    return metrics
