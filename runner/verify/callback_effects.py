"""Verdicts on the callbacks of a recipe: a training with each is compared with one without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from runner.plugin.configs import CallbackConfig
from runner.plugin.registry import Registry
from runner.proof.verdict import Outcome
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.training.callbacks import Callbacks
from runner.training.evaluation import evaluated
from runner.training.pipeline import Assembly, assemble
from runner.training.state_difference import differences
from runner.training.step import Step
from runner.verify.verification import StageVerdict


def judge_callbacks(
    recipe: Recipe,
    registry: Registry,
    updates: int,
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[StageVerdict, ...]:
    """Compares the bits of a short training with each callback alone with those of one without.

    The trainings have no stages, and end with an evaluation and all other calls of a callback.

    Args:
        recipe: The recipe.
        registry: The plugins.
        updates: Length of each training.
        phase: Entered with the name of the callback that is judged.
    """
    surroundings = generators.Globals()
    try:
        expected, _ = _train(recipe, registry, updates, {})
        rows = []
        for kind, config in recipe.callbacks.items():
            with phase(f"callback {kind}"):
                actual, callbacks = _train(recipe, registry, updates, {kind: config})
            rows.append(_row(kind, updates, expected, actual, callbacks))
        return tuple(rows)
    finally:
        surroundings.set()


def _train(
    recipe: Recipe,
    registry: Registry,
    updates: int,
    switched_on: Mapping[str, CallbackConfig],
) -> tuple[dict[str, Any], Callbacks]:
    """Returns the state and the results of a short training, and its callbacks."""
    generators.seed(recipe.seed)
    observed = replace(recipe, stages={}, callbacks=switched_on)
    pipeline = assemble(observed, registry.files)
    callbacks = Callbacks(pipeline)
    step = Step(pipeline)
    callbacks.start({})
    outputs = []
    for _ in range(updates):
        output = step(step.next())
        assert output is not None
        outputs.append(output)
        callbacks.follow_update(output)
    metrics = evaluated(pipeline)
    callbacks.follow_evaluation(metrics)
    callbacks.is_checkpoint_new = True
    callbacks.follow_checkpoint({})
    callbacks.end({})
    return _state(pipeline, outputs, metrics), callbacks


def _state(
    pipeline: Assembly, outputs: list[dict[str, Any]], metrics: dict[str, float]
) -> dict[str, Any]:
    """Returns everything that a callback might have changed."""
    state = pipeline.state_dict()
    entries = ("learner", "source", "progress", "generators")
    return {
        **{entry: state[entry] for entry in entries},
        "updates": outputs,
        "evaluation": metrics,
        "random numbers": generators.state_dict(),
    }


def _row(
    kind: str,
    updates: int,
    expected: dict[str, Any],
    actual: dict[str, Any],
    callbacks: Callbacks,
) -> StageVerdict:
    """Returns the verdict on a callback, with the first difference."""
    # A callback may have a generator of its own, which is not there without it.
    own_generators = actual["generators"].keys() - expected["generators"].keys()
    for name in own_generators:
        del actual["generators"][name]
    difference = next(differences(expected, actual), "")
    change = callbacks.summary()
    evidence = {"updates": updates, "difference": difference, "change": change}
    outcome = Outcome.FAIL if difference or change else Outcome.PASS
    if change or difference:
        summary = change or f"callback '{kind}' changes {difference.lstrip('/')}"
        summary += f"; found in {updates} updates and an evaluation"
    else:
        summary = (
            f"{updates} updates and an evaluation are the same bits with and without it"
        )
        if callbacks.reason:
            summary += "; it would have ended the training here"
    return StageVerdict(f"callbacks.{kind}", (), "Exact", outcome, summary, evidence)
