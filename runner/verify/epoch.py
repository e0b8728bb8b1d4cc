"""Subjects that only sample: the batches of an epoch, without an update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from runner.plugin.contract import Contract
from runner.plugin.registry import Registry
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.trajectory import Trajectory
from runner.proof.trees import clones, leaves
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.likeness import describe, unlike
from runner.verify.subjects import recipe_with

_LAG = 2
"""Batches until whose end an earlier one must be unmodified."""
_UNMODIFIED = Location(STEP, "output", "unmodified")
_EPOCHS = "epochs"


def samples(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step returns the next batch, and whether earlier ones are
    unmodified.
    """
    staged = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        step = Step(assemble(staged, registry.files))
        earlier = deque[tuple[Any, Any]](maxlen=_LAG)

        def sample(_: Any) -> dict[str, Any]:
            batch, noise = step.next()
            is_unmodified = all(_same(*pair) for pair in earlier)
            # The memory of a batch may be written again.
            earlier.append((batch, clones(batch)))
            # An update, which this subject does not make, would count the batch.
            step.count(batch)
            step.progress.updates += 1
            counts = step.progress.state_dict() | {_EPOCHS: step.progress.epochs}
            return {
                "batch": batch,
                "noise": noise,
                "progress": counts,
                "unmodified": is_unmodified,
            }

        return Subject(sample, {}, seed=step.seed, parameters=lambda: ())

    return build


def _same(batch: Any, copy: Any) -> bool:
    return unlike(_frame_of(batch), _frame_of(copy), form=False, content=0.0) is None


def same_epoch(
    baseline: Build, changed: Build, contract: Contract, most: int, seconds: float
) -> Verdict:
    """Compares the batches of an epoch, its last one and the first two of the next.

    Args:
        baseline: Made by ``samples``.
        changed: The same with the stages.
        contract: The contract of the verdict.
        most: Batches at most.
        seconds: Time after which no further batch is compared; four are in any case.
    """
    name = type(contract).__name__
    deadline = time.monotonic() + seconds
    count = 0
    epochs = 0
    batches_of_next = 0
    try:
        reference = Isolation(baseline, 0)
        candidate = Isolation(changed, 0)
        while count < most and batches_of_next < _LAG:
            if count >= 2 * _LAG and time.monotonic() >= deadline:
                break
            expected = _next_frame(reference)
            actual = _next_frame(candidate)
            count += 1
            # A source may reuse the memory of its batches, with and without stages.
            is_expected_unmodified = expected.pop(_UNMODIFIED)
            is_actual_unmodified = actual.pop(_UNMODIFIED)
            if is_expected_unmodified and not is_actual_unmodified:
                summary = (
                    "a batch is modified after it was returned: "
                    f"one of the {_LAG} before batch {count:,}"
                )
                return Verdict(Outcome.FAIL, name, summary)
            location = unlike(expected, actual, form=False, content=0.0)
            if location is not None:
                difference = describe(count, location, expected, actual)
                summary = f"batch {count:,} is another one: {difference}"
                trajectory = Trajectory(count * [None], 0)
                reproduction = Reproduction(baseline, changed, trajectory, count, name)
                return Verdict(Outcome.FAIL, name, summary, reproduction=reproduction)
            epochs = expected[Location(STEP, "output", f"progress.{_EPOCHS}")]
            batches_of_next += epochs >= 1
    except StepError as error:
        return error.verdict(name, baseline)
    extent = f"{count:,} batches, less than an epoch,"
    if epochs:
        extent = "an epoch, to its last batch,"
    evidence = {"batches": count, "epochs": epochs}
    return Verdict(Outcome.PASS, name, f"{extent} are the same", evidence)


def _next_frame(isolation: Isolation) -> Frame:
    (frame,) = isolation.advance([None], _frame_of)
    return frame


def _frame_of(tree: Any) -> Frame:
    return {Location(STEP, "output", path): value for path, value in leaves(tree)}
