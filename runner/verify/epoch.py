"""Subjects that only sample: the batches of an epoch, without an update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from runner.plugin.contract import Contract
from runner.plugin.registry import Registry
from runner.proof.difference import MISSING, described
from runner.proof.isolation import STEP, Frame, Isolation, Location, StepError
from runner.proof.reproduction import Reproduction
from runner.proof.subject import Build, Subject
from runner.proof.subject_states import clones, leaves
from runner.proof.trajectory import Trajectory
from runner.proof.verdict import Outcome, Verdict
from runner.recipe.recipe import Recipe
from runner.training.pipeline import assemble
from runner.training.step import Step
from runner.verify.likeness import unlike
from runner.verify.subjects import recipe_with

_LAG = 2
"""Batches after which an earlier one must still be as it was returned."""
_UNMODIFIED = Location(STEP, "output", "unmodified")
_EPOCHS = "epochs"


def samples(recipe: Recipe, registry: Registry, stages: Collection[str]) -> Build:
    """Makes subjects whose step returns the next batch, and whether an earlier one is still what it was."""
    chosen = recipe_with(recipe, registry, stages)

    def build() -> Subject:
        step = Step(assemble(chosen, registry.files))
        returned = deque[tuple[Any, Any]](maxlen=_LAG)

        def sample(_: Any) -> dict[str, Any]:
            drawn = step.next()
            is_unmodified = all(_same(batch, copy) for batch, copy in returned)
            returned.append((drawn.batch, clones(drawn.batch)))
            step.count(drawn.batch)
            step.progress.updates += 1
            counts = step.progress.state_dict() | {_EPOCHS: step.progress.epochs}
            return {
                "batch": drawn.batch,
                "noise": drawn.noise,
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
        contract: For the verdict.
        most: Batches at most.
        seconds: After which no further batch is compared; four are in any case.
    """
    name = type(contract).__name__
    deadline = time.monotonic() + seconds
    count = complete = beyond = 0
    try:
        reference, candidate = (Isolation(build, 0) for build in (baseline, changed))
        while (
            count < most
            and beyond < _LAG
            and (count < 2 * _LAG or time.monotonic() < deadline)
        ):
            expected, frame = _next_frame(reference), _next_frame(candidate)
            count += 1
            modified = expected.pop(_UNMODIFIED) and not frame.pop(_UNMODIFIED)
            if modified:
                summary = f"a batch is modified after it was returned: one of the {_LAG} before batch {count:,}"
                return Verdict(Outcome.FAIL, name, summary)
            location = unlike(expected, frame, form=False, content=0.0)
            if location is not None:
                values = (values.get(location, MISSING) for values in (expected, frame))
                summary = f"batch {count:,} is another one: {described(count, location, *values)}"
                reproduction = Reproduction(
                    baseline, changed, Trajectory(count * [None], 0), count, name
                )
                return Verdict(Outcome.FAIL, name, summary, reproduction=reproduction)
            complete = expected[Location(STEP, "output", f"progress.{_EPOCHS}")]
            beyond += complete >= 1
    except StepError as error:
        return error.verdict(name, baseline)
    extent = (
        "an epoch, to its last batch,"
        if complete
        else f"{count:,} batches, less than an epoch,"
    )
    return Verdict(
        Outcome.PASS,
        name,
        f"{extent} are the same",
        {"batches": count, "epochs": complete},
    )


def _next_frame(isolation: Isolation) -> Frame:
    (frame,) = isolation.advance([None], _frame_of)
    return frame


def _frame_of(tree: Any) -> Frame:
    return {Location(STEP, "output", path): value for path, value in leaves(tree)}
