"""Compares predictions of the model, and its evaluation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.plugin.configs import ServedRequest
from runner.plugin.contract import Close, Contract, Exact
from runner.plugin.learner import Learner
from runner.plugin.registry import Registry
from runner.plugin.source import Batch, Source, State
from runner.proof.algebra_check import algebra
from runner.proof.close_check import close
from runner.proof.difference import (
    LOADED_TOLERANCE,
    MISSING,
    comparable,
    described,
    differing,
    not_same_bits,
    shared,
)
from runner.proof.exact_check import exact
from runner.proof.fingerprints import SideEffects, objections, side_effects
from runner.proof.isolation import Frame, Isolation, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_check import ALLOWED_ONCE
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import on_host
from runner.proof.trajectory import Trajectory, Update
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system.errors import RunnerError
from runner.system.tensor_trees import map_tensors, tensors
from runner.training import evaluation
from runner.training.pipeline import Assembly, assemble
from runner.verify.changed_state import changed_state
from runner.verify.interruption import interrupted_evaluation
from runner.verify.likeness import CONTENT, unlike
from runner.verify.requests import request_batches
from runner.verify.subjects import LearnerState, Recorded, Training, recipe_with

SIZES = (1, 2, 5, 200, 257)  # of batches for predictions; a server decides them
_GROWN = 3  # times, of the state in which requests are answered
_HALF = 0.5  # of numbers in an input, where every batch has the same
_NEAR = (0.0, 1e-2, 1e-4)  # shares by which inputs differ: rounded numbers must not identify one
_EVALUATED_PARTS = 5  # of the held-out data that are evaluated where predictions are slow


class Asked(NamedTuple):
    """The input of a prediction or evaluation."""

    inputs: Any = None  # evaluates it
    training: bool = False  # the mode in which its modules are found
    most: int | None = None  # held-out samples of this evaluation and of later ones
    stops: int | None = None  # batches or predictions after which the evaluation is interrupted
    requests: tuple[ServedRequest, ...] = ()  # makes the inputs, as a server does
    is_optional: bool = False  # left out, with all that follows, where evaluations are slow

    @property
    def is_evaluation(self) -> bool:
        """Returns whether held-out samples are evaluated."""
        return self.inputs is None and not self.requests


def answers(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Creates subjects whose step predicts for an ``Asked``, or performs an
    update that was ``Recorded``.
    """
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        pipeline = assemble(chosen, registry.files)
        if chosen.model.prediction_batch is not None:
            # One sample more makes a smaller last batch.
            pipeline.source.limit_evaluation(_EVALUATED_PARTS * chosen.model.prediction_batch + 1)
        learner, training = pipeline.learner, Training(pipeline)
        if torch.get_default_dtype() == torch.float64:  # held-out batches are as the source has them
            for part in (each for module in learner.modules().values() for each in module.modules()):
                part.register_forward_pre_hook(lambda _, given: map_tensors(_as_default, given))
            predict = learner.predict  # which need not call its modules
            learner.predict = lambda inputs: predict(map_tensors(_as_default, inputs))  # type: ignore[method-assign]

        def answer(asked: Asked | Recorded) -> dict[str, Any]:
            if isinstance(asked, Recorded):
                return training.step(asked)
            if asked.is_evaluation:
                if asked.most is not None:
                    pipeline.source.limit_evaluation(asked.most)
                metrics: dict[str, float] = {}
                with interrupted_evaluation(learner, asked.stops):
                    metrics = evaluation.evaluated(pipeline)
                modes = {name: all(each.training for each in m.modules()) for name, m in learner.modules().items()}
                return {"evaluate": metrics if asked.stops is None else {}, "training mode": modes}
            for module in learner.modules().values():
                module.train(asked.training)
            with torch.no_grad():
                inputs = asked.inputs
                if asked.requests:
                    inputs = _requested(learner, asked.requests)
                inputs = pipeline.transfer(inputs)
                found = {"predict": learner.predict(inputs)}
                # A sampled symbol hides a difference that the numbers behind it show.
                scores = learner.scores(inputs) if asked.requests else None
            for module in learner.modules().values():
                module.train()
            return found if scores is None else found | {"scores": scores}

        state = {"learner": LearnerState(training.whole_step)}
        return Subject(answer, state, seed=training.whole_step.seed, parameters=lambda: ())

    return build


def _requested(learner: Learner, requests: Sequence[ServedRequest]) -> Any:
    """Makes the inputs of requests in float32: generators return other numbers in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return learner.requested(requests)
    finally:
        torch.set_default_dtype(default)


def _as_default(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def questions(pipeline: Assembly, batches: Sequence[Batch], state: State) -> list[Update]:
    """Inputs in several sizes, in both modes of the modules, for a learner in this state.

    Then those of other batches, in these sizes, too, nearly the same numbers, and those of other
    batches in the memory of the first.
    """
    learner = pipeline.learner
    sizes = prediction_sizes(learner.config.prediction_batch, pipeline.source.size(batches[0]))
    first, *others = ([learner.inputs(each) for each in resized(pipeline.source, one, sizes)] for one in batches)
    asked = [Asked(learner.inputs(batches[0])), *(Asked(each, mode) for each in first for mode in (False, True))]
    asked += [Asked(each) for sizes in others for each in sizes]
    if all(_same_tensors(batches[0], batch) for batch in batches[1:]):
        # A source of one graph has no other input, and a model may be used for others.
        asked.append(Asked(map_tensors(partial(_scaled, _HALF), asked[0].inputs)))
    smallest = first[0] if first else asked[0].inputs
    if any(tensor.is_floating_point() for tensor in tensors(smallest)):
        asked += [Asked(map_tensors(partial(_scaled, 1.0 + share), smallest)) for share in _NEAR]
    in_its_memory = [Update(Asked(learner.inputs(each)), place=asked[0]) for each in batches[1:]]
    requests = request_batches(learner, asked[0].inputs) if learner.config.prediction_batch is None else []
    return [
        Update(asked[0], {"learner": state}),
        *map(Update, asked[1:]),
        *in_its_memory,
        *_requests(requests, state),
    ]


def _requests(requests: Sequence[Sequence[ServedRequest]], state: State) -> Iterator[Update]:
    """Yields answers to batches of requests in a state with larger numbers.

    A sampled symbol is a whole number, which hides small differences. In the first updates of a
    training, symbols are all about as likely, whatever the decoder has read.
    """
    grown = map_tensors(partial(_scaled, _GROWN), state)
    for number, batch in enumerate(requests):
        yield Update(Asked(requests=tuple(batch)), None if number else {"learner": grown})


def _scaled(factor: float, tensor: Tensor) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _same_tensors(first: Batch, second: Batch) -> bool:
    """Returns whether two batches have the same tensors, to the bit."""
    pairs = list(itertools.zip_longest(tensors(first), tensors(second)))
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def sizes_of_questions(pipeline: Assembly, batch: Batch) -> tuple[int, ...]:
    """Returns the batch sizes of the predictions that ``questions`` requests."""
    rows = pipeline.source.size(batch)
    sizes = prediction_sizes(pipeline.learner.config.prediction_batch, rows)
    batches = resized(pipeline.source, batch, sizes)
    return tuple(sorted({rows, *(pipeline.source.size(part) for part in batches)}))


def prediction_sizes(prediction_batch: int | None, rows: int) -> Sequence[int]:
    """Returns the sizes of batches whose predictions are compared.

    Args:
        prediction_batch: As ``LearnerConfig.prediction_batch``.
        rows: Samples of a batch of the training.
    """
    if prediction_batch is None:
        return SIZES
    # A stage may predict in parts of a training batch, and the learner predicts
    # in parts of another size.
    largest = max(prediction_batch, rows) + 1
    smaller = [size for size in SIZES if size < largest]
    return [*smaller, largest]


def resized(source: Source, batch: Batch, sizes: Iterable[int]) -> Iterator[Batch]:
    """The first samples of a batch, or all of them again and again, in those of the sizes that can be had."""
    rows = source.size(batch)
    whole = type(source).split is Source.split  # otherwise only the source can make a larger one
    for size in sizes:
        if size < rows:
            yield next(source.split(batch, size))
        elif whole:
            picks = (torch.arange(size) + torch.arange(size) // rows) % rows  # in another order every time
            yield source.take(batch, picks)


def same_answers(baseline: Build, changed: Build, asked: Sequence[Update], contract: Contract) -> Verdict:
    """Returns whether both predict the same in the same state.

    If the contract promises neither bits nor algebra, only the form and
    finiteness of predictions are compared.
    """
    if isinstance(contract, Exact):
        return exact(baseline, changed, asked)
    if isinstance(contract, Close):
        return close(baseline, changed, asked, states=len(asked))
    return alike(baseline, changed, asked)


def evaluations(states: Mapping[str, Any] | None, updates: Sequence[Recorded], batch_size: int) -> list[Update]:
    """Returns evaluations with updates between them, the first in these states.

    Two evaluations measure all held-out samples. The next one is interrupted after its first batch.
    Two more measure other parameters: those of a state that was loaded, and those after a large
    step. Others measure a part of the samples, where a source can do so: their last batches have
    one sample less than a batch, or a single sample.

    Args:
        states: Of the subject before the first evaluation.
        updates: The last of them is made after the second evaluation and before later ones.
        batch_size: Samples of a batch of the evaluation.
    """
    first, *between, last = Update(Asked(), states), *map(Update, updates)
    # A part can only become smaller.
    counts = sorted({2 * batch_size - 1, batch_size + 1, max(1, batch_size - 1), 1}, reverse=True)
    parts = [Update(Asked(most=count, is_optional=True)) for count in counts]
    parts[0] = replace(parts[0], states=states)
    further = [update for part in parts for update in (part, last)]
    changed = {name: changed_state(state) for name, state in (states or {}).items()}
    moved = [Update(Asked(), changed or None), last, Update(Asked(is_optional=True)), last]
    return [first, *between, Update(Asked()), last, Update(Asked(stops=1)), last, *moved, *further]


def is_evaluation(update: Update) -> bool:
    """Returns whether a subject of ``answers`` evaluates to the end."""
    asked = update.batch
    return isinstance(asked, Asked) and asked.is_evaluation and asked.stops is None


class Evaluated(NamedTuple):
    """Results of evaluations, and of updates between them."""

    frames: list[Frame]
    effects: SideEffects


def evaluated(build: Build, asked: Sequence[Update], float64: bool = False, seconds: float = math.inf) -> Evaluated:
    """Evaluates; raises a ``StepError`` if that is impossible.

    Args:
        build: Makes the subject.
        asked: Evaluations and updates.
        float64: Whether to evaluate in float64.
        seconds: After which no optional evaluation starts.
    """
    deadline = time.monotonic() + seconds
    trajectory = Trajectory(asked, 0, float64)
    isolation = trajectory.isolated(build)
    frames = []
    for frame, following in zip(trajectory.updated(isolation), [*asked[1:], None], strict=True):
        frames.append(on_host(frame))
        is_optional = following is not None and getattr(following.batch, "is_optional", False)
        if is_optional and time.monotonic() > deadline:
            break
    return Evaluated(frames, SideEffects.of(isolation))


def same_evaluations(
    own: Callable[[bool], Evaluated], baseline: Build, changed: Build, asked: Sequence[Update], contract: Exact | Close
) -> Iterator[Verdict]:
    """Compares the results of evaluations, and of updates before and after them.

    An evaluation may take long, so ``own`` returns a saved one of the baseline, in float64 if
    requested; both are repeated only if the changed one differs. An evaluation that is impossible
    in float64 is compared in its original precision only, and there is no comparison if the
    baseline cannot be evaluated.
    """
    name, float64 = type(contract).__name__, isinstance(contract, Close)
    try:
        mine = own(float64)
        asked = asked[: len(mine.frames)]
        theirs = _evaluated_or_message(changed, asked, float64)
    except StepError as error:
        if (reference := _or_none(own, False)) is None:
            return
        if not float64:
            yield error.verdict(name, baseline)
            return
        truth = _or_none(own, True)
        yield _rounded(truth.frames[0] if truth else {}, reference.frames[0], baseline, changed, asked)
        return
    if isinstance(theirs, str):
        yield Verdict(Outcome.FAIL, name, f"an evaluation raises an error, which the baseline's does not: {theirs}")
        return
    if _are_same(mine, theirs, float64):
        yield from objections(side_effects(mine.effects, theirs.effects), name)
        found = Verdict(Outcome.PASS, name, "evaluations have the same results")
    else:
        found = algebra(baseline, changed, asked) if float64 else exact(baseline, changed, asked)
        if found:
            summary = "evaluations differed, but not when they were repeated"
            found = Verdict(Outcome.FAIL, name, summary)
    if found and float64:
        found = _rounded(mine.frames[0], own(False).frames[0], baseline, changed, asked[:1])
    if found.outcome is not Outcome.INCONCLUSIVE or not float64:
        yield found


def _evaluated_or_message(build: Build, asked: Sequence[Update], float64: bool) -> Evaluated | str:
    """Evaluates; returns the message for the user if there is one, because the baseline can be evaluated."""
    try:
        return evaluated(build, asked, float64)
    except RunnerError as error:
        return str(error)


def _or_none(own: Callable[[bool], Evaluated], float64: bool) -> Evaluated | None:
    try:
        return own(float64)
    except StepError:
        return None


def _are_same(own: Evaluated, theirs: Evaluated, float64: bool) -> bool:
    criterion = partial(differing, tolerance=LOADED_TOLERANCE) if float64 else not_same_bits
    names = shared(own.effects.parts, theirs.effects.parts)
    for mine, others in zip(own.frames, theirs.frames, strict=True):
        seen = {location: mine[location] for location in comparable(mine, others, names)}
        if any(True for _ in criterion(seen, others)):
            return False
    return True


def _rounded(truth: Frame, own: Frame, baseline: Build, changed: Build, asked: Sequence[Update]) -> Verdict:
    """Returns whether an evaluation in the original precision is about as far
    from float64 as the baseline's.
    """
    try:
        theirs, *_ = evaluated(changed, asked).frames
    except StepError as error:
        return error.verdict("Close", baseline)
    for location, exact_value in truth.items():
        if location.kind == "output" and isinstance(exact_value, float):
            allowed = ALLOWED_ONCE * abs(own[location] - exact_value) + CONTENT * max(1.0, abs(exact_value))
            if not math.isnan(exact_value) and not abs(theirs[location] - exact_value) <= allowed:
                difference = described(1, location, own[location], theirs[location])
                reproduction = Reproduction(baseline, changed, Trajectory(asked, 0), 1, "Close")
                summary = f"an evaluation rounds more than the baseline's: {difference}"
                return Verdict(Outcome.FAIL, "Close", summary, reproduction=reproduction)
    return Verdict(Outcome.PASS, "Close", "an evaluation has the same result")


def alike(baseline: Build, changed: Build, asked: Sequence[Update]) -> Verdict:
    """Returns whether predictions have the same form and are finite where the baseline's are."""
    try:
        one, other = (Isolation(build, 0) for build in (baseline, changed))
        for number, question in enumerate(asked, start=1):
            for isolation in (one, other):
                isolation.load(question.states or {})
            own, theirs = one.step(question.batch), other.step(question.batch)
            found = unlike(own, theirs, form=True)
            if found is not None:
                difference = described(number, found, *(each.get(found, MISSING) for each in (own, theirs)))
                return Verdict(Outcome.FAIL, "Statistical", f"another answer in form: {difference}")
    except StepError as error:
        return error.verdict("Statistical", baseline)
    return Verdict(Outcome.PASS, "Statistical", f"{len(asked)} answers of the same form")
