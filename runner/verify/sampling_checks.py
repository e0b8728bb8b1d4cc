"""Compares the batches and noise that are sampled for updates, also in a training
that was interrupted and resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from runner.plugin.context import Context
from runner.plugin.contract import Close, Contract, Statistical
from runner.plugin.implementation import imported
from runner.plugin.registry import Registry
from runner.plugin.source import Source, State
from runner.proof.difference import (
    MISSING,
    described,
    digest,
)
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build, Stateful, Subject
from runner.proof.subject_states import leaves
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import CheckpointError, RunnerError
from runner.training import evaluation
from runner.training.checkpoint import kept
from runner.training.packing import UnpackableError
from runner.training.pipeline import Assembly, assemble, resolve_device
from runner.training.step import Step
from runner.verify.generator_states import MOST_IN_ADVANCE, GeneratorStates, without_generators
from runner.verify.likeness import CONTENT, is_output, unlike
from runner.verify.subjects import BuildError, LearnerState, recipe_with

_SOON = 3  # updates after all that decides what is drawn was given, in which it has to be the same
GOING_ON = 4  # updates of a resumed training that are compared
_STUCK = 1000  # updates in which every training comes further
OBSERVED = (3, 4, 4)  # updates of a training before its first evaluation, between both, and after the second
_SHORT = 100  # updates of an epoch after which a training may as well be interrupted
_PROGRESS = "progress"  # how far the training is, in what ``draws`` returns; before what may be led elsewhere
CHECKPOINT, REHEARSAL, EVALUATION = object(), object(), object()  # special inputs of the step of ``draws``
_ROUNDING = MOST_ULPS * torch.finfo(torch.float32).eps  # how far off an element may be, of the largest
_ELEMENTS = 0.05  # and how many may be further off in the first updates
_ELSEWHERE, _OFTEN = 2, 0.1  # limits of deviating samples: their number, and their share of updates


def draws(
    recipe: Recipe,
    registry: Registry,
    stages: Collection[str],
    resumed: State | None = None,
    change: Callable[[Source], None] | None = None,
) -> Build:
    """Creates subjects whose step trains on batches of their source, and returns
    the batch and the result.

    For the input ``CHECKPOINT``, the step trains to the next possible interruption and returns a
    checkpoint; subjects that were created with it continue from there. For ``REHEARSAL``, it
    predicts as in an evaluation; for ``EVALUATION``, it evaluates and returns the metrics.

    Args:
        recipe: The recipe.
        registry: The plugins.
        stages: Kinds of stages.
        resumed: The checkpoint.
        change: Changes the data of the source before learner and stages are made.
    """
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = _assembled(chosen, registry, resumed, change)
        if resumed is not None:
            pipeline.load_state_dict(resumed["pipeline"])
            generators.load_state_dict(resumed["generators"])
        step = Step(pipeline)

        def draw(asked: Any) -> dict[str, Any]:
            if asked is CHECKPOINT:
                return _interrupted(step)
            if asked is REHEARSAL:
                return pipeline.source.rehearse(pipeline.learner, step.batch) or {}
            if asked is EVALUATION:
                return {"metrics": evaluation.evaluated(pipeline)}
            drawn = step.next()
            before = {_PROGRESS: dict(vars(step.progress)), "batch": drawn.batch, "noise": drawn.noise}
            output = step(drawn)
            after = {name: each.get_state() for name, each in pipeline.context.generators.items()}
            counted = pipeline.source.statistics().items()
            statistics = {name: torch.tensor(value, dtype=torch.float64) for name, value in counted}
            return before | {"generators": after, "output": output, "statistics": statistics}

        parts: dict[str, Stateful] = {"learner": LearnerState(step)}
        if knows_its_learner(pipeline.source):
            parts["pipeline"] = _AllButLearner(step)
        return Subject(draw, parts, seed=step.seed)

    return build


def _assembled(
    recipe: Recipe, registry: Registry, resumed: State | None, change: Callable[[Source], None] | None
) -> Assembly:
    if change is None:
        return assemble(recipe, registry.files, resumed=resumed and resumed["pipeline"])
    implementation = imported(recipe.data)

    def build_source(config: Any, context: Context) -> Source:
        source: Source = implementation(config, context)
        change(source)
        return source

    size = recipe.train.batch_size
    return Assembly(recipe, registry.files, resolve_device(recipe.device), size, None, build_source)


def knows_its_learner(source: Source) -> bool:
    """Returns whether the samples of a source may depend on what was learned, and
    thus on rounding errors.
    """
    kind = type(source)
    return kind.bind is not Source.bind or kind.feedback is not Source.feedback


def _interrupted(step: Step) -> State:
    """Returns a checkpoint from the position where a training would write the next one; stages
    write their final remarks.

    In the second epoch, if the first is short: what is drawn then depends on what was drawn before.
    """
    before, epoch = step.progress.position, step.progress.epoch_samples or 0
    first = epoch if epoch <= _SHORT * step.pipeline.batch_size else 0
    for _ in range(_STUCK):
        step()
        if step.progress.position != before and step.progress.samples > first:
            break
    else:
        raise RuntimeError(f"after {_STUCK} more updates, the progress of the training has not changed")
    for stage in step.pipeline.stages.values():
        stage.closing_notes()
    return kept({"pipeline": step.pipeline.state_dict(), "generators": generators.state_dict()})


class _AllButLearner:
    """The state that determines the next samples, except the learner; stages restart."""

    def __init__(self, step: Step) -> None:
        self.step, self.state_dict = step, step.pipeline.state_dict

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned of another one."""
        own = self.step.pipeline.state_dict()
        self.step.pipeline.load_state_dict(state | {name: own[name] for name in ("learner", "stages")})
        self.step.reset()


class Drawing(NamedTuple):
    """The length of a comparison of samples."""

    updates: int  # at least
    most: int = 0  # and as many as fit into the time
    seconds: float = 0.0


def same_draws(baseline: Build, changed: Build, contract: Contract, length: Drawing) -> Verdict:
    """Returns whether both sample the same for an update after learning the same, and use the same
    number of random numbers.

    The first updates must also return nearly the same results, because their batches passed through
    the stage; and predictions are requested at times. Where a source depends on its learner, a
    ``Close`` stage starts every update with the baseline's state, because rounding errors would
    lead to other batches. Such a source may still sample something else at times, and then receives
    all state that determines samples (``_LedElsewhere``). Where the stage promises neither bits nor
    algebra, only the form of batches is compared.
    """
    name, form, elsewhere = type(contract).__name__, isinstance(contract, Statistical), _LedElsewhere(length.updates)
    deadline = time.monotonic() + length.seconds
    random = GeneratorStates()
    try:
        one, other = (Isolation(build, 0) for build in (baseline, changed))
        knows = "pipeline" in one.subject.state
        led, content = knows and isinstance(contract, Close), CONTENT if knows else _ROUNDING
        for update in range(1, max(length.updates, length.most) + 1):
            if update > length.updates and time.monotonic() >= deadline:
                break
            own, theirs = (_advanced(each, output=update <= _SOON and not form) for each in (one, other))
            samples = without_generators(own), without_generators(theirs)
            found = unlike(*samples, form, content, rounded=True)
            much = found is not None and unlike(*samples, form, content, _ELEMENTS, rounded=True) is not None
            # The baseline's states are needed also where the sample differs.
            overdue = random.add(update, own, theirs)
            if found is None:
                found = overdue
                much = found is not None
            elsewhere.count(parted=found is not None)
            counted = found is not None and found.name.startswith(f"{_PROGRESS}.")  # which rounding does not change
            if found is not None and (counted or not (led and elsewhere.is_excused(much=much))):
                reproduction = Reproduction(baseline, changed, Trajectory(update * [None], 0), update, "Close")
                return Verdict(Outcome.FAIL, name, _not_the_same(update, found, own, theirs), reproduction=reproduction)
            if led:
                other.load({"learner": one.subject.state["learner"].state_dict()})
                if elsewhere.is_over(much=much):
                    other.load({"pipeline": one.subject.state["pipeline"].state_dict()})
                    random.forget()
            if update in (1, length.updates) and not form:
                for each in (one, other):
                    each.advance([REHEARSAL], lambda _: None)
        for later in range(update + 1, update + MOST_IN_ADVANCE + 1):
            if random.first_ahead is None:
                break
            baseline_frame = _advanced(one)
            random.add(later, baseline_frame, baseline_frame)
        if (found := random.first_ahead) is not None:
            reproduction = Reproduction(baseline, changed, Trajectory(update * [None], 0), update, "Close")
            return Verdict(Outcome.FAIL, name, _not_the_same(update, found, own, theirs), reproduction=reproduction)
    except StepError as error:
        return error.verdict(name, baseline)
    drawn = {"drawn": elsewhere.excluded()}
    return Verdict(Outcome.PASS, name, f"the same is drawn for {elsewhere.updates:,} updates", drawn)


class _LedElsewhere:
    """Excuses deviations of a source that depends on its learner, which rounding errors can cause:
    first of a few elements, then of more.

    Large deviations are not excused directly after the state that determines samples was copied,
    nor are frequent ones.
    """

    def __init__(self, steady: int) -> None:
        self.steady = steady
        """Number of initial updates in which samples must be the same except for a few elements."""
        self.updates = self._times = self._given = self._since = 0

    def count(self, *, parted: bool) -> None:
        """Counts an update, in which something else was drawn or not."""
        self.updates += 1
        if parted and not self._since:
            self._since, self._times = self.updates, self._times + 1

    def is_excused(self, *, much: bool) -> bool:
        """Returns whether rounding may explain the last update."""
        early = self.updates <= max(self.steady, self._given + _SOON)
        return self._times <= _ELSEWHERE + _OFTEN * self.updates and not (much and early)

    def is_over(self, *, much: bool) -> bool:
        """Returns whether the state that determines samples must be copied now,
        and resets the count.
        """
        if not (much or (self._since and self.updates >= self._since + _SOON)):
            return False
        self._given, self._since = self.updates, 0
        return True

    def excluded(self) -> int:
        """Returns the number of updates without deviation that would exclude the same error rate:
        by Poisson's upper bound.
        """
        from scipy.special import chdtri

        return int(self.updates * chdtri(2, 0.05) / chdtri(2 * self._times + 2, 0.05))


def _not_the_same(update: int, found: Location, own: Frame, theirs: Frame) -> str:
    returned = is_output(found.name)
    place = found if returned else found._replace(slot="next_batch")
    what = "the result of an update" if returned else "the sample"
    difference = described(update, place, *(each.get(found, MISSING) for each in (own, theirs)))
    return f"{what} is not the same: {difference}"


def _advanced(isolation: Isolation, *, output: bool = False) -> Frame:
    """Returns the samples of the next update, and its results if ``output`` is set."""
    (found,) = isolation.advance([None], lambda returned: dict(leaves(returned)))
    return {Location(STEP, "output", path): value for path, value in found.items() if output or not is_output(path)}


def same_when_resumed(
    baseline: Callable[[State | None], Build],
    changed: Callable[[State | None], Build],
    contract: Contract,
    updates: int,
) -> Verdict:
    """Returns whether a training that is interrupted after ``updates`` and
    resumed equals one without interruption.

    Both arguments create subjects, from a checkpoint if one is given. Where a
    stage promises neither bits nor algebra, only the form is compared; a baseline
    that cannot resume either excuses it.
    """
    name = type(contract).__name__
    form = isinstance(contract, Statistical)
    found = _otherwise(changed, updates, form)
    if found is None or _otherwise(baseline, updates, form) is not None:
        return Verdict(Outcome.PASS, name, "a resumed training continues as if it had not been interrupted")
    return Verdict(Outcome.FAIL, name, found)


def _otherwise(make: Callable[[State | None], Build], updates: int, form: bool) -> str | None:
    """Returns the first difference in a resumed training; None without a difference."""
    try:
        isolation = Isolation(make(None), 0)
        isolation.advance(updates * [None], lambda _: None)
        (checkpoint,) = isolation.advance([CHECKPOINT], lambda state: state)
        resumed = Isolation(make(checkpoint), 0)
        resumed.updates = isolation.updates
        for update in range(1, GOING_ON + 1):
            own, theirs = (_advanced(each, output=True) for each in (isolation, resumed))
            found = unlike(own, theirs, form)
            if found is not None:
                difference = described(update, found, *(each.get(found, MISSING) for each in (own, theirs)))
                return f"a resumed training is another one: {difference}"
    except (StepError, BuildError, CheckpointError, UnpackableError) as error:
        return f"a training cannot be kept and resumed, or its end reported: {error}"
    return None


class Observation(NamedTuple):
    """A training with evaluations in it.

    Attributes:
        prints: Fingerprints of the results of every update, and of the state at the end.
        metrics: Fingerprints of the results of every evaluation.
    """

    prints: list[dict[str, bytes]]
    metrics: list[dict[str, bytes]]

    def parting(self, other: Observation) -> tuple[int, str] | None:
        """Returns the first update, from 1, and the name of a value that differs; None if none does."""
        for number, (prints, others) in enumerate(zip(self.prints, other.prints, strict=True), start=1):
            names = dict.fromkeys((*prints, *others))
            name = next((name for name in names if prints.get(name) != others.get(name)), None)
            if name is not None:
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
            observation.metrics.extend(isolation.advance([EVALUATION], _prints))
        observation.prints.extend(isolation.advance([None] * count, _prints))
    state = {str(location): digest(value) for location, value in isolation.initial().items()}
    observation.prints.append(state)
    return observation


def observe_or_message(build: Build) -> Observation | str:
    """Returns the training; a message if it fails."""
    try:
        return observe(build)
    except (StepError, RunnerError) as error:
        return str(error)


def _prints(returned: Any) -> dict[str, bytes]:
    return {path: digest(value) for path, value in leaves(returned)}


def evaluate(isolation: Isolation) -> dict[str, Any]:
    """Returns the metrics of a subject of ``draws``."""
    (metrics,) = isolation.advance([EVALUATION], _metrics)
    return metrics


def _metrics(returned: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = returned["metrics"]
    return metrics
