"""What surrounds an update: what is drawn for it, what the model answers, and how it is evaluated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.compare.close import ALLOWED_ONCE, algebra, close
from runner.compare.difference import MISSING, absolute_difference, described, digest
from runner.compare.fingerprints import objections
from runner.compare.isolation import Frame, Isolation, Location, StepError, Trajectory, Update
from runner.compare.states import saved
from runner.compare.subject import Build, Subject
from runner.compare.verdict import Outcome, Verdict
from runner.compare.verify import exact
from runner.plugin.contract import Close, Contract, Exact, Statistical
from runner.plugin.registry import Registry
from runner.plugin.source import Batch, Source, State
from runner.recipe.recipe import Recipe
from runner.system.tree import map_tensors
from runner.train.assemble import Assembly, assemble
from runner.train.step import Step
from runner.verify.subjects import LearnerState, recipe_with

_SIZES = (1, 3, 200)  # of batches that a model is asked about; who serves it decides
_CONTENT, _ELEMENTS = 1e-4, 0.05  # how far off an element may be, of the largest, and how many may be further off


class Asked(NamedTuple):
    """What a model is asked."""

    inputs: Any  # None evaluates it
    training: bool = False  # the mode in which its modules are found


def answers(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step trains nothing: it answers what is ``Asked``."""
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files)
        learner = pipeline.learner
        if torch.get_default_dtype() == torch.float64:  # held-out batches are as the source has them
            for part in (each for module in learner.modules().values() for each in module.modules()):
                part.register_forward_pre_hook(lambda _, given: map_tensors(_as_default, given))

        def answer(asked: Asked) -> dict[str, Any]:
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

        return Subject(answer, {"learner": LearnerState(pipeline)}, parameters=lambda: ())

    return build


def _as_default(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def questions(pipeline: Assembly, batches: Sequence[Batch], state: State) -> list[Update]:
    """Inputs in several sizes, in both modes of the modules, for a learner in this state.

    At last those of another batch come in the memory of the first.
    """
    learner, batch = pipeline.learner, batches[0]
    inputs = [learner.inputs(each) for each in resized(pipeline.source, batch, _SIZES)]
    asked = [Asked(learner.inputs(batch)), *(Asked(each, training) for each in inputs for training in (False, True))]
    others = [Update(Asked(learner.inputs(each)), place=asked[0]) for each in batches[1:]]
    return [Update(asked[0], {"learner": state}), *map(Update, asked[1:]), *others]


def resized(source: Source, batch: Batch, sizes: Iterable[int]) -> Iterator[Batch]:
    """The first samples of a batch, or all of them again and again, in those of the sizes that can be had."""
    rows = source.size(batch)
    whole = type(source).split is Source.split  # or only the source knows how to make a larger one
    for size in sizes:
        if size < rows:
            yield next(source.split(batch, size))
        elif whole:
            picks = torch.arange(size) % rows
            yield map_tensors(lambda each: each[picks] if each.dim() and len(each) == rows else each, batch)  # noqa: B023


def same_answers(baseline: Build, changed: Build, asked: Sequence[Update], contract: Contract) -> Iterator[Verdict]:
    """Whether both answer the same in the same state, and come to the same when they are evaluated.

    Of what promises neither bits nor algebra, only that its answers have the same form and are finite. What cannot be
    evaluated in float64 is not compared there.
    """
    evaluation = Update(Asked(None), asked[0].states)
    if isinstance(contract, Exact):
        yield exact(baseline, changed, [*asked, evaluation])
    elif isinstance(contract, Close):
        yield close(baseline, changed, asked, states=len(asked))
        found = algebra(baseline, changed, [evaluation])
        if found.outcome is not Outcome.INCONCLUSIVE:
            yield _evaluated(baseline, changed, evaluation) if found else found
            yield from objections(found.evidence, "Close")
    else:
        yield alike(baseline, changed, asked)


def _evaluated(baseline: Build, changed: Build, evaluation: Update) -> Verdict:
    """Whether an evaluation in the change's own precision is about as far from that in float64 as the baseline's."""
    trajectories = (Trajectory([evaluation], 0, float64=True), *[Trajectory([evaluation], 0)] * 2)
    pairs = zip(trajectories, (baseline, baseline, changed), strict=True)
    try:
        truth, own, theirs = (next(each.updated(each.isolated(build))) for each, build in pairs)
    except StepError as error:
        return error.verdict("Close", baseline)
    for location, exact_value in truth.items():
        if location.kind == "output" and isinstance(exact_value, float):
            allowed = ALLOWED_ONCE * abs(own[location] - exact_value) + _CONTENT * max(1.0, abs(exact_value))
            if not math.isnan(exact_value) and not abs(theirs[location] - exact_value) <= allowed:
                difference = described(1, location, own[location], theirs[location])
                return Verdict(Outcome.FAIL, "Close", f"an evaluation rounds more than the baseline's: {difference}")
    return Verdict(Outcome.PASS, "Close", "an evaluation comes to the same")


def draws(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step trains on what its own source draws, and returns what that was."""
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files)
        step = Step(pipeline)

        def draw(_: Any) -> dict[str, Any]:
            drawn = step.next()
            before = {"batch": drawn.batch, "noise": drawn.noise, "progress": step.progress.state_dict()}
            step(drawn)
            return before | {"generators": {n: each.get_state() for n, each in pipeline.context.generators.items()}}

        return Subject(draw, {"learner": LearnerState(pipeline)}, seed=step.seed)

    return build


def same_draws(baseline: Build, changed: Build, updates: int, contract: Contract) -> Verdict:
    """Whether both draw the same for an update when they have learnt the same, and draw as many random numbers.

    The changed one begins every update with the baseline's state, or rounding would lead them to other batches; a
    source that samples by what updates return still picks another sample now and then, so some elements may differ.
    Where the change promises neither bits nor algebra, only the form of batches is compared.
    """
    name = type(contract).__name__
    try:
        one, other = (Isolation(build, 0) for build in (baseline, changed))
        for update in range(1, updates + 1):
            own, theirs = one.step(None), other.step(None)
            found = _unlike(own, theirs, isinstance(contract, Statistical))
            if found is not None:
                place = found._replace(slot="next_batch")
                difference = described(update, place, *(each.get(found, MISSING) for each in (own, theirs)))
                return Verdict(Outcome.FAIL, name, f"what is drawn is not the same: {difference}")
            other.load(saved(one.subject))
    except StepError as error:
        return error.verdict(name, baseline)
    return Verdict(Outcome.PASS, name, f"the same is drawn for {updates} updates")


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


def _unlike(own: Frame, theirs: Frame, form: bool) -> Location | None:
    """The first output that is not as the baseline's; of tensors of numbers only the form if told."""
    for location in dict.fromkeys((*own, *theirs)):
        if location.kind != "output":
            continue
        value, other = (each.get(location, MISSING) for each in (own, theirs))
        if not isinstance(value, Tensor) or location.name.startswith("generators."):
            alike = digest(value) == digest(other)
        else:
            alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
            alike = alike and bool((value.isfinite() <= other.isfinite()).all())
            alike = alike and (form or _same_content(value, other))
        if not alike:
            return location
    return None


def _same_content(value: Tensor, other: Tensor) -> bool:
    error = absolute_difference(value, other)
    if error is None or not error.numel():
        return True
    allowed = _CONTENT * float(value.abs().max()) if value.is_floating_point() else 0.0
    return float((error > allowed).double().mean()) <= _ELEMENTS
