"""Compares predictions of the model, and its evaluation."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    comparable,
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
from runner.proof.subject_states import widen_inputs
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import on_host
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.system.errors import IndivisibleBatchError, RunnerError
from runner.system.tensor_trees import map_tensors, tensors, widened
from runner.training import evaluation
from runner.training.pipeline import Assembly, assemble
from runner.verify.changed_state import changed_state
from runner.verify.interruption import interrupted_evaluation
from runner.verify.likeness import CONTENT, describe, unlike
from runner.verify.requests import request_batches
from runner.verify.subjects import Recorded, Training, recipe_with

# A server decides the sizes of its batches.
SIZES = (1, 2, 5, 200, 257)
"""Sizes of the batches whose predictions are compared."""
_GROWTH = 3
"""Factor of the numbers of the state in which served requests are answered."""
_HALF = 0.5
"""Factor of the numbers of an input where all batches have the same ones."""
# Rounded numbers must not identify an input.
_NEAR = (0.0, 1e-2, 1e-4)
"""Relative differences of inputs that are nearly the same."""
_EVALUATED_BATCHES = 5
"""Batches of held-out data that are evaluated where predictions are slow."""


class Query(NamedTuple):
    """The input of a prediction or evaluation.

    Attributes:
        inputs: Inputs of the model; None for an evaluation and for requests.
        training: Whether modules are in training mode when they predict.
        sample_limit: Held-out samples of this evaluation and of later ones; None
            for no change.
        stop_after: Batches or predictions after which the evaluation is
            interrupted; None for a complete one.
        requests: Served requests that make the inputs.
        is_optional: Whether this and all later evaluations may be left out
            because evaluations are slow.
        has_test: Whether the test part is measured, too, where the source has one.
    """

    inputs: Any = None
    training: bool = False
    sample_limit: int | None = None
    stop_after: int | None = None
    requests: tuple[ServedRequest, ...] = ()
    is_optional: bool = False
    has_test: bool = False

    @property
    def is_evaluation(self) -> bool:
        """Returns whether held-out samples are evaluated."""
        return self.inputs is None and not self.requests


def answers(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Creates subjects whose step answers a ``Query``, or performs an update that
    was ``Recorded``.
    """
    staged = recipe_with(recipe, registry, stages)
    prediction_batch = staged.model.prediction_batch

    def build() -> Subject:
        pipeline = assemble(staged, registry.files)
        if prediction_batch is not None:
            # One sample more makes a smaller last batch.
            samples = _EVALUATED_BATCHES * prediction_batch + 1
            pipeline.source.limit_evaluation(samples)
        training = Training(pipeline)
        if torch.get_default_dtype() == torch.float64:
            _convert_inputs(pipeline.learner)

        def answer(query: Query | Recorded) -> dict[str, Any]:
            if isinstance(query, Recorded):
                return training.step(query)
            if query.is_evaluation:
                return _evaluate(pipeline, query)
            return _predict(pipeline, query)

        return training.subject(answer)

    return build


def _convert_inputs(learner: Learner) -> None:
    """Makes a learner and its modules convert their inputs to float64."""
    widen_inputs(learner.modules().values())
    # A prediction need not call the modules.
    predict = learner.predict
    learner.predict = lambda inputs: predict(map_tensors(widened, inputs))  # type: ignore[method-assign]


def _evaluate(pipeline: Assembly, query: Query) -> dict[str, Any]:
    """Returns the metrics, and the modes in which the evaluation leaves the modules."""
    learner = pipeline.learner
    if query.sample_limit is not None:
        pipeline.source.limit_evaluation(query.sample_limit)
    metrics: dict[str, float] = {}
    with interrupted_evaluation(learner, query.stop_after):
        metrics = evaluation.evaluated(pipeline)
    modes = {
        name: all(submodule.training for submodule in module.modules())
        for name, module in learner.modules().items()
    }
    result: dict[str, Any] = {
        "evaluate": metrics if query.stop_after is None else {},
        "training mode": modes,
    }
    if query.has_test and pipeline.source.has_test():
        result["test"] = evaluation.evaluated(pipeline, "test")
    return result


def _predict(pipeline: Assembly, query: Query) -> dict[str, Any]:
    learner = pipeline.learner
    for module in learner.modules().values():
        module.train(query.training)
    scores = None
    with torch.no_grad():
        inputs = query.inputs
        if query.requests:
            inputs = _requested(learner, query.requests)
        inputs = pipeline.transfer(inputs)
        result = {"predict": learner.predict(inputs)}
        if query.requests:
            # A sampled symbol hides a difference that the numbers behind it show.
            scores = learner.scores(inputs)
    for module in learner.modules().values():
        module.train()
    return result if scores is None else result | {"scores": scores}


def _requested(learner: Learner, requests: Sequence[ServedRequest]) -> Any:
    """Makes the inputs of requests in float32: generators return different numbers in
    float64.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return learner.requested(requests)
    finally:
        torch.set_default_dtype(default)


def questions(
    pipeline: Assembly, batches: Sequence[Batch], state: State
) -> list[Update]:
    """Returns queries in several sizes and both modes of the modules, for a learner in
    this state.

    Further ones have the inputs of the other batches in these sizes, nearly the same
    numbers, and the inputs of other batches in the memory of the first.
    """
    learner = pipeline.learner
    source = pipeline.source
    prediction_batch = learner.config.prediction_batch
    sizes = prediction_sizes(prediction_batch, source.size(batches[0]))
    inputs_by_batch = [
        [learner.inputs(variant) for variant in resized(source, batch, sizes)]
        for batch in batches
    ]
    first = Query(learner.inputs(batches[0]))
    modes = itertools.product(inputs_by_batch[0], (False, True))
    queries = [Query(inputs, training) for inputs, training in modes]
    queries += map(Query, itertools.chain.from_iterable(inputs_by_batch[1:]))

    if all(_same_tensors(batches[0], batch) for batch in batches[1:]):
        # A source of one graph has no other input, and a model may be used for others.
        queries.append(Query(map_tensors(partial(_scaled, _HALF), first.inputs)))
    smallest = inputs_by_batch[0][0] if inputs_by_batch[0] else first.inputs
    if any(tensor.is_floating_point() for tensor in tensors(smallest)):
        factors = (1.0 + difference for difference in _NEAR)
        queries += [
            Query(map_tensors(partial(_scaled, factor), smallest)) for factor in factors
        ]

    in_memory_of_first = [
        Update(Query(learner.inputs(batch)), place=first) for batch in batches[1:]
    ]
    requests: Sequence[Sequence[ServedRequest]] = []
    if prediction_batch is None:
        requests = request_batches(learner, first.inputs)
    return [
        Update(first, {"learner": state}),
        *map(Update, queries),
        *in_memory_of_first,
        *_served(requests, state),
    ]


def _served(
    requests: Sequence[Sequence[ServedRequest]], state: State
) -> Iterator[Update]:
    """Yields queries for batches of requests, in a state with larger numbers.

    A sampled symbol is a discrete number, which hides small differences. In the first
    updates of a training, all symbols are about equally likely, whatever the decoder
    has read.
    """
    grown = map_tensors(partial(_scaled, _GROWTH), state)
    for number, batch in enumerate(requests):
        states = None if number else {"learner": grown}
        yield Update(Query(requests=tuple(batch)), states)


def _scaled(factor: float, tensor: Tensor) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _same_tensors(first: Batch, second: Batch) -> bool:
    """Returns whether two batches have the same tensors, to the bit."""
    first_tensors = list(tensors(first))
    second_tensors = list(tensors(second))
    if len(first_tensors) != len(second_tensors):
        return False
    return all(map(torch.equal, first_tensors, second_tensors))


def sizes_of_questions(pipeline: Assembly, batch: Batch) -> tuple[int, ...]:
    """Returns the batch sizes of the predictions that ``questions`` requests."""
    source = pipeline.source
    rows = source.size(batch)
    sizes = prediction_sizes(pipeline.learner.config.prediction_batch, rows)
    variants = resized(source, batch, sizes)
    return tuple(sorted({rows, *map(source.size, variants)}))


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
    """Yields the first samples of a batch, or all of them repeatedly, in those of the
    sizes that are possible; nothing of a batch that cannot be cut.
    """
    rows = source.size(batch)
    # A source that splits its batches in its way must enlarge them itself.
    can_grow = type(source).split is Source.split
    for size in sizes:
        # A check of other sizes is one of several: the others compare such batches.
        with suppress(IndivisibleBatchError):
            if size < rows:
                yield next(source.split(batch, size))
            elif can_grow:
                # Every repetition has the samples in another order.
                positions = torch.arange(size)
                yield source.take(batch, (positions + positions // rows) % rows)


def same_answers(
    baseline: Build, changed: Build, queries: Sequence[Update], contract: Contract
) -> Verdict:
    """Returns whether both predict the same in the same state.

    If the contract promises neither bits nor algebra, only the form and
    finiteness of predictions are compared.
    """
    if isinstance(contract, Exact):
        return exact(baseline, changed, queries)
    if isinstance(contract, Close):
        return close(baseline, changed, queries, states=len(queries))
    return alike(baseline, changed, queries)


def evaluations(
    states: Mapping[str, Any] | None, updates: Sequence[Recorded], batch_size: int
) -> list[Update]:
    """Returns evaluations with updates between them, the first in these states.

    Two evaluations measure all held-out samples. The next one is interrupted after its
    first batch. Two more measure other parameters: those of a state that was loaded,
    and those after a large step. The first, and that of a loaded state, also measure the
    test part. Others measure a part of the samples, where a source
    can do so: their last batches have one sample less than a batch, or a single sample.

    Args:
        states: States of the subject before the first evaluation.
        updates: The last of them is made after the second evaluation and before later
            ones.
        batch_size: Samples of a batch of the evaluation.
    """
    first_updates = [Update(recorded) for recorded in updates]
    last = first_updates[-1]
    changed = {name: changed_state(state) for name, state in (states or {}).items()}
    sequence = [
        Update(Query(has_test=True), states),
        *first_updates[:-1],
        Update(Query()),
        last,
        Update(Query(stop_after=1)),
        last,
        Update(Query(has_test=True), changed or None),
        last,
        Update(Query(is_optional=True)),
        last,
    ]

    # The held-out samples of a source can only become fewer.
    limits = {2 * batch_size - 1, batch_size + 1, max(1, batch_size - 1), 1}
    states_before = states
    for limit in sorted(limits, reverse=True):
        query = Query(sample_limit=limit, is_optional=True)
        sequence += [Update(query, states_before), last]
        states_before = None
    return sequence


def is_evaluation(update: Update) -> bool:
    """Returns whether a subject of ``answers`` evaluates to the end."""
    query = update.batch
    return isinstance(query, Query) and query.is_evaluation and query.stop_after is None


class Evaluated(NamedTuple):
    """Results of evaluations, and of updates between them."""

    frames: list[Frame]
    effects: SideEffects


def evaluated(
    build: Build,
    queries: Sequence[Update],
    float64: bool = False,
    seconds: float = math.inf,
) -> Evaluated:
    """Evaluates; raises a ``StepError`` if that is impossible.

    Args:
        build: Makes the subject.
        queries: Evaluations and updates.
        float64: Whether to evaluate in float64.
        seconds: Time after which no optional evaluation starts.
    """
    deadline = time.monotonic() + seconds
    trajectory = Trajectory(queries, 0, float64)
    isolation = trajectory.isolated(build)
    frames: list[Frame] = []
    for frame in trajectory.updated(isolation):
        frames.append(on_host(frame))
        following = queries[len(frames)].batch if len(frames) < len(queries) else None
        is_optional = isinstance(following, Query) and following.is_optional
        if is_optional and time.monotonic() > deadline:
            break
    return Evaluated(frames, SideEffects.of(isolation))


def same_evaluations(
    evaluate_baseline: Callable[[bool], Evaluated],
    baseline: Build,
    changed: Build,
    queries: Sequence[Update],
    contract: Exact | Close,
) -> Iterator[Verdict]:
    """Compares the results of evaluations, and of updates before and after them.

    An evaluation may take long, so the baseline's results are computed once; both are
    repeated only if the candidate's differ. An evaluation that is impossible in float64
    is compared in its original precision only. Yields nothing if the baseline cannot be
    evaluated.

    Args:
        evaluate_baseline: Returns the stored results, in float64 if called with True.
        baseline: Made by ``answers``.
        changed: The same with the stages.
        queries: Evaluations and updates.
        contract: Determines whether bits or algebra are compared.
    """
    name = type(contract).__name__
    float64 = isinstance(contract, Close)
    try:
        reference = evaluate_baseline(float64)
        queries = queries[: len(reference.frames)]
        candidate = _evaluated_or_message(changed, queries, float64)
    except StepError as error:
        original = _or_none(evaluate_baseline, False)
        if original is None:
            return
        if not float64:
            yield error.verdict(name, baseline)
            return
        precise = _or_none(evaluate_baseline, True)
        exact_frame = precise.frames[0] if precise else {}
        yield _rounded(exact_frame, original.frames[0], baseline, changed, queries)
        return

    if isinstance(candidate, str):
        summary = (
            f"an evaluation raises an error, which the baseline's does not: {candidate}"
        )
        yield Verdict(Outcome.FAIL, name, summary)
        return
    if _are_same(reference, candidate, float64):
        effects = side_effects(reference.effects, candidate.effects)
        yield from objections(effects, name)
        verdict = Verdict(Outcome.PASS, name, "evaluations have the same results")
    else:
        compare = algebra if float64 else exact
        verdict = compare(baseline, changed, queries)
        if verdict:
            summary = "evaluations differed, but not when they were repeated"
            verdict = Verdict(Outcome.FAIL, name, summary)
    if verdict and float64:
        # Float64 hides an evaluation that rounds more than the baseline's.
        original = evaluate_baseline(False)
        verdict = _rounded(
            reference.frames[0], original.frames[0], baseline, changed, queries[:1]
        )
    if verdict.outcome is not Outcome.INCONCLUSIVE or not float64:
        yield verdict


def _evaluated_or_message(
    build: Build, queries: Sequence[Update], float64: bool
) -> Evaluated | str:
    """Evaluates; returns a message for the user instead of raising it, because the
    baseline can be evaluated.
    """
    try:
        return evaluated(build, queries, float64)
    except RunnerError as error:
        return str(error)


def _or_none(
    evaluate_baseline: Callable[[bool], Evaluated], float64: bool
) -> Evaluated | None:
    try:
        return evaluate_baseline(float64)
    except StepError:
        return None


def _are_same(reference: Evaluated, candidate: Evaluated, float64: bool) -> bool:
    differences = not_same_bits
    if float64:
        differences = partial(differing, tolerance=LOADED_TOLERANCE)
    names = shared(reference.effects.parts, candidate.effects.parts)
    pairs = zip(reference.frames, candidate.frames, strict=True)
    for expected, actual in pairs:
        locations = comparable(expected, actual, names)
        values = {location: expected[location] for location in locations}
        if any(True for _ in differences(values, actual)):
            return False
    return True


def _rounded(
    exact_frame: Frame,
    reference: Frame,
    baseline: Build,
    changed: Build,
    queries: Sequence[Update],
) -> Verdict:
    """Returns whether an evaluation in the original precision is about as far from
    float64 as the baseline's.
    """
    try:
        candidate, *_ = evaluated(changed, queries).frames
    except StepError as error:
        return error.verdict("Close", baseline)
    for location, value in exact_frame.items():
        is_metric = location.kind == "output" and isinstance(value, float)
        if not is_metric or math.isnan(value):
            continue
        rounding = ALLOWED_ONCE * abs(reference[location] - value)
        tolerance = rounding + CONTENT * max(1.0, abs(value))
        # A NaN of the candidate is within no tolerance.
        if abs(candidate[location] - value) <= tolerance:
            continue
        difference = describe(1, location, reference, candidate)
        summary = f"an evaluation rounds more than the baseline's: {difference}"
        trajectory = Trajectory(queries, 0)
        reproduction = Reproduction(baseline, changed, trajectory, 1, "Close")
        return Verdict(Outcome.FAIL, "Close", summary, reproduction=reproduction)
    return Verdict(Outcome.PASS, "Close", "an evaluation has the same result")


def alike(baseline: Build, changed: Build, queries: Sequence[Update]) -> Verdict:
    """Returns whether predictions have the same form and are finite where the
    baseline's are.
    """
    name = "Statistical"
    try:
        reference = Isolation(baseline, 0)
        candidate = Isolation(changed, 0)
        for number, query in enumerate(queries, start=1):
            for isolation in (reference, candidate):
                isolation.load(query.states or {})
            expected = reference.step(query.batch)
            actual = candidate.step(query.batch)
            location = unlike(expected, actual, form=True)
            if location is not None:
                difference = describe(number, location, expected, actual)
                summary = f"another answer in form: {difference}"
                return Verdict(Outcome.FAIL, name, summary)
    except StepError as error:
        return error.verdict(name, baseline)
    return Verdict(Outcome.PASS, name, f"{len(queries)} answers of the same form")
