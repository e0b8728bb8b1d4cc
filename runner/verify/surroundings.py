"""What surrounds an update: what is drawn for it, what the model answers, and how it is evaluated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.compare.close import ALLOWED_ONCE, algebra, close
from runner.compare.difference import (
    LOADED_TOLERANCE,
    MISSING,
    absolute_difference,
    comparable,
    described,
    differing,
    digest,
    not_same_bits,
    shared,
)
from runner.compare.fingerprints import SideEffects, objections, side_effects
from runner.compare.isolation import STEP, Frame, Isolation, Location, StepError, Trajectory, Update
from runner.compare.states import leaves, on_host
from runner.compare.subject import Build, Stateful, Subject
from runner.compare.verdict import Outcome, Verdict
from runner.compare.verify import exact
from runner.plugin.contract import Close, Contract, Exact, Statistical
from runner.plugin.registry import Registry
from runner.plugin.source import Batch, Source, State
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import CheckpointError
from runner.system.tree import map_tensors
from runner.train.assemble import Assembly, assemble
from runner.train.checkpoint import kept
from runner.train.step import Step
from runner.verify.subjects import BuildError, LearnerState, Recorded, Training, recipe_with

_SIZES = (1, 2, 5, 200, 257)  # of batches that a model is asked about; who serves it decides
_SOON = 3  # updates after all that decides what is drawn was given, in which it has to be the same
_GOING_ON = 4  # updates of a resumed training that are compared
_STUCK = 1000  # updates in which every training comes further
CHECKPOINT = object()  # is asked of what ``draws`` makes
_CONTENT, _ELEMENTS = 1e-4, 0.05  # how far off an element may be, of the largest, and how many may be further off


class Asked(NamedTuple):
    """What a model is asked."""

    inputs: Any = None  # evaluates it
    training: bool = False  # the mode in which its modules are found


def answers(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step answers what is ``Asked``, or makes the update that was ``Recorded``."""
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files)
        learner, training = pipeline.learner, Training(pipeline)
        if torch.get_default_dtype() == torch.float64:  # held-out batches are as the source has them
            for part in (each for module in learner.modules().values() for each in module.modules()):
                part.register_forward_pre_hook(lambda _, given: map_tensors(_as_default, given))
            predict = learner.predict  # which need not call its modules
            learner.predict = lambda inputs: predict(map_tensors(_as_default, inputs))  # type: ignore[method-assign]

        def answer(asked: Asked | Recorded) -> dict[str, Any]:
            if isinstance(asked, Recorded):
                return training.step(asked)
            if asked.inputs is None:
                found = pipeline.source.evaluate(learner)
                modes = {name: all(each.training for each in m.modules()) for name, m in learner.modules().items()}
                return {"evaluate": found, "training mode": modes}
            for module in learner.modules().values():
                module.train(asked.training)
            found = learner.predict(pipeline.transfer(asked.inputs))
            for module in learner.modules().values():
                module.train()
            return {"predict": found}

        state = {"learner": LearnerState(pipeline)}
        return Subject(answer, state, seed=training.whole_step.seed, parameters=lambda: ())

    return build


def _as_default(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def questions(pipeline: Assembly, batches: Sequence[Batch], state: State) -> list[Update]:
    """Inputs in several sizes, in both modes of the modules, for a learner in this state.

    Then those of other batches, in these sizes, too, and in the memory of the first.
    """
    learner = pipeline.learner
    first, *others = ([learner.inputs(each) for each in resized(pipeline.source, one, _SIZES)] for one in batches)
    asked = [Asked(learner.inputs(batches[0])), *(Asked(each, mode) for each in first for mode in (False, True))]
    asked += [Asked(each) for sizes in others for each in sizes]
    in_its_memory = [Update(Asked(learner.inputs(each)), place=asked[0]) for each in batches[1:]]
    return [Update(asked[0], {"learner": state}), *map(Update, asked[1:]), *in_its_memory]


def resized(source: Source, batch: Batch, sizes: Iterable[int]) -> Iterator[Batch]:
    """The first samples of a batch, or all of them again and again, in those of the sizes that can be had."""
    rows = source.size(batch)
    whole = type(source).split is Source.split  # or only the source knows how to make a larger one
    for size in sizes:
        if size < rows:
            yield next(source.split(batch, size))
        elif whole:
            picks = (torch.arange(size) + torch.arange(size) // rows) % rows  # in another order every time
            yield map_tensors(lambda each: each[picks] if each.dim() and len(each) == rows else each, batch)  # noqa: B023


def same_answers(baseline: Build, changed: Build, asked: Sequence[Update], contract: Contract) -> Verdict:
    """Whether both answer the same in the same state.

    Of what promises neither bits nor algebra, only that its answers have the same form and are finite.
    """
    if isinstance(contract, Exact):
        return exact(baseline, changed, asked)
    if isinstance(contract, Close):
        return close(baseline, changed, asked, states=len(asked))
    return alike(baseline, changed, asked)


def evaluations(states: Mapping[str, Any] | None, updates: Sequence[Recorded]) -> list[Update]:
    """Two evaluations, the first in these states, with all but the last of some updates in between, and that one."""
    first, *between, last = Update(Asked(), states), *map(Update, updates)
    return [first, *between, Update(Asked()), last]


class Evaluated(NamedTuple):
    """What evaluations, and updates among them, came to."""

    frames: list[Frame]
    effects: SideEffects


def evaluated(build: Build, asked: Sequence[Update], float64: bool = False) -> Evaluated:
    """Evaluates; a ``StepError`` if that cannot be done."""
    trajectory = Trajectory(asked, 0, float64)
    isolation = trajectory.isolated(build)
    return Evaluated([on_host(frame) for frame in trajectory.updated(isolation)], SideEffects.of(isolation))


def same_evaluations(
    own: Callable[[bool], Evaluated], baseline: Build, changed: Build, asked: Sequence[Update], contract: Exact | Close
) -> Iterator[Verdict]:
    """Whether both come to the same when they are evaluated, and in updates before and after.

    An evaluation may take long, so ``own`` has that of the baseline, in float64 if told; only if the changed one comes
    to something else, both are made anew. What cannot be evaluated in float64 is not compared there.
    """
    name, float64 = type(contract).__name__, isinstance(contract, Close)
    try:
        mine, theirs = own(float64), evaluated(changed, asked, float64)
    except StepError as error:
        verdict = error.verdict(name, baseline)
        if verdict.outcome is Outcome.FAIL:
            yield verdict
        return
    if _are_same(mine, theirs, float64):
        yield from objections(side_effects(mine.effects, theirs.effects), name)
        found = Verdict(Outcome.PASS, name, "evaluations come to the same")
    else:
        found = algebra(baseline, changed, asked) if float64 else exact(baseline, changed, asked)
        if found:
            summary = "evaluations came to something else, though not when they were made again"
            found = Verdict(Outcome.FAIL, name, summary)
    if found and float64:
        found = _rounded(mine.frames[0], own(False).frames[0], baseline, changed, asked[:1])
    if found.outcome is not Outcome.INCONCLUSIVE or not float64:
        yield found


def _are_same(own: Evaluated, theirs: Evaluated, float64: bool) -> bool:
    criterion = partial(differing, tolerance=LOADED_TOLERANCE) if float64 else not_same_bits
    names = shared(own.effects.parts, theirs.effects.parts)
    for mine, others in zip(own.frames, theirs.frames, strict=True):
        seen = {location: mine[location] for location in comparable(mine, others, names)}
        if any(True for _ in criterion(seen, others)):
            return False
    return True


def _rounded(truth: Frame, own: Frame, baseline: Build, changed: Build, asked: Sequence[Update]) -> Verdict:
    """Whether an evaluation in the change's own precision is about as far from that in float64 as the baseline's."""
    try:
        (theirs,) = evaluated(changed, asked).frames
    except StepError as error:
        return error.verdict("Close", baseline)
    for location, exact_value in truth.items():
        if location.kind == "output" and isinstance(exact_value, float):
            allowed = ALLOWED_ONCE * abs(own[location] - exact_value) + _CONTENT * max(1.0, abs(exact_value))
            if not math.isnan(exact_value) and not abs(theirs[location] - exact_value) <= allowed:
                difference = described(1, location, own[location], theirs[location])
                return Verdict(Outcome.FAIL, "Close", f"an evaluation rounds more than the baseline's: {difference}")
    return Verdict(Outcome.PASS, "Close", "an evaluation comes to the same")


def draws(recipe: Recipe, registry: Registry, stages: Collection[str], resumed: State | None = None) -> Build:
    """Makes subjects whose step trains on what its own source draws, and returns what that was and came to.

    Asked for a ``CHECKPOINT``, it trains to where a training may be interrupted and returns one; subjects that were
    made with it go on from there.
    """
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files, resumed=resumed and resumed["pipeline"])
        if resumed is not None:
            pipeline.load_state_dict(resumed["pipeline"])
            generators.load_state_dict(resumed["generators"])
        step = Step(pipeline)

        def draw(asked: Any) -> dict[str, Any]:
            if asked is CHECKPOINT:
                return _interrupted(step)
            drawn = step.next()
            before = {"batch": drawn.batch, "noise": drawn.noise, "progress": dict(vars(step.progress))}
            output = step(drawn)
            after = {name: each.get_state() for name, each in pipeline.context.generators.items()}
            return before | {"generators": after, "output": output}

        parts: dict[str, Stateful] = {"learner": LearnerState(pipeline)}
        if _knows_its_learner(pipeline.source):
            parts["pipeline"] = _Drawing(pipeline)
        return Subject(draw, parts, seed=step.seed)

    return build


def _knows_its_learner(source: Source) -> bool:
    """Whether what it draws may depend on what was learnt, and so on how that was rounded."""
    kind = type(source)
    return kind.bind is not Source.bind or kind.feedback is not Source.feedback


def _interrupted(step: Step) -> State:
    """A checkpoint from where a training would write the next one; stages say what they would at its end, too."""
    before = step.progress.position
    for _ in range(_STUCK):
        step()
        if step.progress.position != before:
            break
    else:
        raise RuntimeError(f"after {_STUCK} more updates, the training has not come any further by its own count")
    for stage in step.pipeline.stages.values():
        stage.closing_notes()
    return kept({"pipeline": step.pipeline.state_dict(), "generators": generators.state_dict()})


class _Drawing:
    """All that decides what is drawn next, but the learner; stages begin anew with what they have of their own."""

    def __init__(self, pipeline: Assembly) -> None:
        self.pipeline, self.state_dict = pipeline, pipeline.state_dict

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned of another one."""
        own = self.pipeline.state_dict()
        self.pipeline.load_state_dict(state | {name: own[name] for name in ("learner", "stages")})


class Drawing(NamedTuple):
    """For how long what is drawn is compared."""

    updates: int  # at least
    most: int = 0  # and as many as fit into the time
    seconds: float = 0.0


def same_draws(baseline: Build, changed: Build, contract: Contract, length: Drawing) -> Verdict:
    """Whether both draw the same for an update when they have learnt the same, and draw as many random numbers.

    Where a source knows its learner, a change that is close begins every update with the baseline's state, or rounding
    would lead them to other batches. Such a source still draws something else now and then, so some elements may
    differ; and if more do after the first updates, the changed one is given all that decides what is drawn, and may not
    differ again at once. Where the change promises neither bits nor algebra, only the form of batches is compared.
    """
    name, count, given = type(contract).__name__, 0, 0
    deadline = time.monotonic() + length.seconds
    try:
        one, other = (Isolation(build, 0) for build in (baseline, changed))
        knows = "pipeline" in one.subject.state
        led = knows and isinstance(contract, Close)
        while count < length.updates or (count < length.most and time.monotonic() < deadline):
            own, theirs = (_advanced(each) for each in (one, other))
            found = _unlike(own, theirs, isinstance(contract, Statistical), _ELEMENTS if knows else 0.0)
            count += 1
            if found is not None and (not led or count <= max(length.updates, given + _SOON)):
                place = found._replace(slot="next_batch")
                difference = described(count, place, *(each.get(found, MISSING) for each in (own, theirs)))
                return Verdict(Outcome.FAIL, name, f"what is drawn is not the same: {difference}")
            given = given if found is None else count
            if led:
                parts = ["learner"] if found is None else ["learner", "pipeline"]
                other.load({part: one.subject.state[part].state_dict() for part in parts})
    except StepError as error:
        return error.verdict(name, baseline)
    return Verdict(Outcome.PASS, name, f"the same is drawn for {count:,} updates", {"drawn": count})


def _advanced(isolation: Isolation, *, output: bool = False) -> Frame:
    """What is drawn for the next update, and what that returns if told."""
    (found,) = isolation.advance([None], lambda returned: dict(leaves(returned)))
    return {Location(STEP, "output", path): value for path, value in found.items() if output or not _is_output(path)}


def _is_output(path: str) -> bool:
    return path.partition(".")[0] == "output"


def same_when_resumed(
    baseline: Callable[[State | None], Build],
    changed: Callable[[State | None], Build],
    contract: Contract,
    updates: int,
) -> Verdict:
    """Whether a training that is interrupted after so many updates and resumed is the one that was not.

    Both make subjects, from a checkpoint if told. Where a change promises neither bits nor algebra, only the form is
    compared; a baseline that does not resume either excuses it.
    """
    name = type(contract).__name__
    form = isinstance(contract, Statistical)
    found = _otherwise(changed, updates, form)
    if found is None or _otherwise(baseline, updates, form) is not None:
        return Verdict(Outcome.PASS, name, "a resumed training goes on as if it had not been interrupted")
    return Verdict(Outcome.FAIL, name, found)


def _otherwise(make: Callable[[State | None], Build], updates: int, form: bool) -> str | None:
    """What is not the same in a training that was resumed; None if all is."""
    try:
        isolation = Isolation(make(None), 0)
        isolation.advance(updates * [None], lambda _: None)
        (checkpoint,) = isolation.advance([CHECKPOINT], lambda state: state)
        resumed = Isolation(make(checkpoint), 0)
        resumed.updates = isolation.updates
        for update in range(1, _GOING_ON + 1):
            own, theirs = (_advanced(each, output=True) for each in (isolation, resumed))
            found = _unlike(own, theirs, form)
            if found is not None:
                difference = described(update, found, *(each.get(found, MISSING) for each in (own, theirs)))
                return f"a resumed training is another one: {difference}"
    except (StepError, BuildError, CheckpointError) as error:
        return f"a training cannot be kept and resumed, or its end reported: {error}"
    return None


def alike(baseline: Build, changed: Build, asked: Sequence[Update]) -> Verdict:
    """Whether answers have the same form and are finite where the baseline's are."""
    try:
        one, other = (Isolation(build, 0) for build in (baseline, changed))
        for number, question in enumerate(asked, start=1):
            for isolation in (one, other):
                isolation.load(question.states or {})
            own, theirs = one.step(question.batch), other.step(question.batch)
            found = _unlike(own, theirs, form=True)
            if found is not None:
                difference = described(number, found, *(each.get(found, MISSING) for each in (own, theirs)))
                return Verdict(Outcome.FAIL, "Statistical", f"another answer in form: {difference}")
    except StepError as error:
        return error.verdict("Statistical", baseline)
    return Verdict(Outcome.PASS, "Statistical", f"{len(asked)} answers of the same form")


def _unlike(own: Frame, theirs: Frame, form: bool, share: float = 0.0) -> Location | None:
    """The first output that is not as the baseline's, but for a share of elements; of numbers only the form if told."""
    for location in dict.fromkeys((*own, *theirs)):
        if location.kind != "output":
            continue
        value, other = (each.get(location, MISSING) for each in (own, theirs))
        if not isinstance(value, Tensor) or location.name.startswith("generators."):
            alike = digest(value) == digest(other)
        else:
            alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
            alike = alike and bool((value.isfinite() <= other.isfinite()).all())
            alike = alike and (form or _same_content(value, other, share))
        if not alike:
            return location
    return None


def _same_content(value: Tensor, other: Tensor, share: float) -> bool:
    error = absolute_difference(value, other)
    if error is None or not error.numel():
        return True
    allowed = 0.0
    if value.is_floating_point():
        allowed = _CONTENT * max(float(value.abs().max()), 0.0 if value.dim() else 1.0)  # a mean may be nearly zero
    return float((error > allowed).double().mean()) <= share
