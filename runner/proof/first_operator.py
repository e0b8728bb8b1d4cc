"""Finds the first operator in which two subjects diverge, by making an update of both again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from runner.proof.difference import LOADED_TOLERANCE, TOLERANCE
from runner.proof.isolation import Isolation
from runner.proof.operator_search import (
    Compared,
    DivergingOperator,
    OperatorSearch,
    Recording,
)
from runner.proof.operators import TRUSTED, OperatorRecorder
from runner.proof.reproduction import Reproduction
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.subject import Build
from runner.proof.subject_states import named_parameters, saved
from runner.proof.trajectory import Trajectory, Update
from runner.proof.trees import leaves
from runner.proof.values import ValueTable
from runner.proof.verdict import Outcome, Verdict

EVIDENCE = "operator"
"""Evidence has the diverging operator under this name."""
SECONDS = 60.0
"""Time for recording operators."""


def name_operator(verdict: Verdict, seconds: float = SECONDS) -> Verdict:
    """Returns the verdict; a FAIL of numbers with the first operator that diverges.

    The search never changes the outcome. If it fails, the verdict has a sentence with the reason.

    Args:
        verdict: Its ``reproduction`` makes the update again.
        seconds: Operators are not recorded any more afterwards.
    """
    if verdict.outcome is not Outcome.FAIL or verdict.reproduction is None:
        return verdict
    try:
        operator = find_first_operator(verdict.reproduction, seconds)
    except Exception as error:
        # The search only explains the verdict, so its errors never change it.
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        operator = f"the diverging operator was not found: {reason}"
    if isinstance(operator, DivergingOperator):
        data = operator.data()
    else:
        data = {"remark": operator}
    return replace(
        verdict,
        summary=f"{verdict.summary}; {operator}",
        evidence=verdict.evidence | {EVIDENCE: data},
        reproduction=None,
    )


def find_first_operator(
    reproduction: Reproduction, seconds: float = SECONDS
) -> DivergingOperator | str:
    """Makes the update of both again, and compares the values of their operators.

    Values are matched by content and not by position: a change may merge, reorder or leave out
    operators as long as what depends on them is the same. From the tensors that differ after the
    update, the search follows the candidate's operators backward as far as their values are not the
    baseline's. The earliest operator that it reaches is the one that diverges.

    Args:
        reproduction: The update.
        seconds: Operators are not recorded any more afterwards.

    Returns:
        The operator; a sentence with the reason if none can be named.
    """
    reproduction = reproduction.narrowed()
    trajectory = reproduction.trajectory
    update = reproduction.update
    started = time.monotonic()
    deadline = started + seconds
    # One table for both, so that equal values have the same number.
    table = ValueTable(_tolerance(reproduction))
    recorder = OperatorRecorder(table, deadline=deadline)
    reference = record(trajectory, reproduction.baseline, update, recorder)
    elapsed = time.monotonic() - started
    recorder = OperatorRecorder(table, is_reference=False, deadline=deadline)
    candidate = record(trajectory, reproduction.changed, update, recorder)
    search = OperatorSearch(table, reference, candidate)
    operator = search.first()
    if isinstance(operator, str) or operator.baseline is None:
        return operator
    if search.compared is None:
        return operator
    if trajectory.float64:
        return replace(operator, float64=operator.baseline)
    # Another recording of the baseline must fit into the remaining time.
    if update == 0 or 2 * elapsed > deadline - time.monotonic():
        return operator
    exact = _in_float64(reproduction, reference, search.compared)
    return replace(operator, float64=exact)


def _tolerance(reproduction: Reproduction) -> float:
    """Returns the share of a value by which it may differ."""
    if reproduction.contract == "Exact":
        return 0.0
    if not reproduction.trajectory.float64:
        return MOST_ULPS * torch.finfo(torch.float32).eps
    updates = reproduction.trajectory.updates[: reproduction.update]
    is_loaded = any(update.states is not None for update in updates)
    return LOADED_TOLERANCE if is_loaded else TOLERANCE


def _in_float64(
    reproduction: Reproduction, reference: Recording, compared: Compared
) -> float | None:
    """Returns the element of the baseline's operator in float64; None if it has no such
    operator there.
    """
    table = ValueTable(0.0)
    batch = reproduction.trajectory.updates[reproduction.update - 1].batch
    update = Update(batch, reference.start, seed_of(reproduction))
    trajectory = Trajectory([update], reproduction.trajectory.seed, float64=True)
    recorder = OperatorRecorder(table)
    try:
        operators = record(trajectory, reproduction.baseline, 1, recorder).operators
    except Exception:
        # A baseline need not run in float64.
        return None
    if compared.position >= len(operators):
        return None
    expected = reference.operators[compared.position]
    operator = operators[compared.position]
    if operator.name != expected.name or operator.shapes != expected.shapes:
        return None
    match = operator.outputs[compared.output]
    if match is None or match == TRUSTED:
        return None
    return float(table.values[match.number].numbers[compared.element])


def seed_of(reproduction: Reproduction) -> int:
    """Returns the seed with which a subject makes the update as if it had made all earlier ones."""
    first = 0
    updates = reproduction.trajectory.updates[: reproduction.update]
    for number, update in enumerate(updates):
        if update.states is not None and update.seed is not None:
            # The count of updates starts again with a state that has a seed.
            first = update.seed - number
    return first + reproduction.update - 1


def record(
    trajectory: Trajectory, build: Build, number: int, recorder: OperatorRecorder
) -> Recording:
    """Makes the first updates of a trajectory, and records the operators of the last of them.

    Args:
        trajectory: The updates.
        build: Makes the subject.
        number: Number of the update that is recorded; 0 for building the subject.
        recorder: Records the operators.
    """
    if number == 0:
        with recorder:
            isolation = trajectory.isolated(build)
        return Recording(recorder, _tensors(isolation, None), {})
    isolation = trajectory.isolated(build)
    recorder.name_modules(isolation.subject)
    start: dict[str, Any] = {}
    copies = trajectory.copies()
    *earlier, last = trajectory.updates[:number]
    for update in earlier:
        batch = trajectory.prepare(isolation, update, copies)
        isolation.advance([batch], lambda _: None)
    batch = trajectory.prepare(isolation, last, copies)
    with _recording(recorder, isolation, start):
        (output,) = isolation.advance([batch], lambda returned: returned)
    return Recording(recorder, _tensors(isolation, output), start)


@contextmanager
def _recording(
    recorder: OperatorRecorder, isolation: Isolation, start: dict[str, Any]
) -> Iterator[None]:
    """Copies the state of a subject, and records its operators inside of the ``with``."""
    start.update(saved(isolation.subject))
    with recorder:
        yield


def _tensors(isolation: Isolation, output: Any) -> dict[str, Any]:
    returned = dict(leaves(output, "output", has_means=False))
    state = {str(location): value for location, value in isolation.initial().items()}
    parameters = named_parameters(isolation.subject).items()
    gradients = {f"{name}.grad": parameter.grad for name, parameter in parameters}
    return returned | gradients | state
