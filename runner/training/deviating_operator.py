"""Finds the operator in which an update as trained deviates from the baseline's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from runner.plugin.contract import Contract, Exact
from runner.proof.operator_search import DivergingOperator, OperatorSearch, Recording
from runner.proof.operators import OperatorRecorder
from runner.proof.rounding_error import MOST_ULPS
from runner.proof.trees import clones, leaves
from runner.proof.values import ValueTable
from runner.system import generators
from runner.training.repetition import BaselineLearner, Snapshot
from runner.training.step import Step

if TYPE_CHECKING:
    from runner.plugin.learner import Learner
    from runner.training.pipeline import Assembly


def find_deviating_operator(
    step: Step,
    pipeline: Assembly,
    baseline: BaselineLearner,
    snapshot: Snapshot,
    contract: Contract,
) -> DivergingOperator | str:
    """Repeats an update of both from a snapshot, and compares their operators.

    The state of the training is restored afterwards, and its stages start with the state that they
    store in checkpoints, as after a resume.

    Returns:
        The operator; a sentence with the reason if none can be named.
    """
    tolerance = MOST_ULPS * torch.finfo(torch.float32).eps
    if isinstance(contract, Exact):
        tolerance = 0.0
    table = ValueTable(tolerance)
    # A plugin may raise anything, and the alarm must be reported without the operator, too.
    try:
        reference = OperatorRecorder(table)
        output = baseline.update_from(step, snapshot, around=reference)
        expected = Recording(reference, _tensors(output, baseline.learner), {})
        # The training continues after an alarm, if the recipe wants that.
        with _restored(step, pipeline):
            recorder = OperatorRecorder(table, is_reference=False)
            output = _update_as_trained(step, pipeline, snapshot, recorder)
            trained = Recording(recorder, _tensors(output, step.learner), {})
            return OperatorSearch(table, expected, trained).first()
    except Exception as error:
        return f"the deviating operator was not found: {type(error).__name__}: {error}"


def _update_as_trained(
    step: Step, pipeline: Assembly, snapshot: Snapshot, recorder: OperatorRecorder
) -> Any:
    _load(step, pipeline, clones(snapshot.state), snapshot.counts)
    step.seed(snapshot.counts["updates"])
    inputs = clones(snapshot.inputs)
    with recorder:
        return step.update(inputs)


@contextmanager
def _restored(step: Step, pipeline: Assembly) -> Iterator[None]:
    """Restores the state and the random generators of a training after the ``with``."""
    state = clones(step.learner.complete_state())
    counts = step.progress.state_dict()
    stages = {
        kind: clones(stage.state_dict()) for kind, stage in pipeline.stages.items()
    }
    try:
        with generators.Globals().apart():
            yield
    finally:
        _load(step, pipeline, state, counts)
        for kind, stage in pipeline.stages.items():
            stage.load_state_dict(stages[kind])


def _load(step: Step, pipeline: Assembly, state: Any, counts: dict[str, int]) -> None:
    step.learner.load_complete_state(state)
    step.progress.load_state_dict(counts)
    step.reset()
    # Stages may have copies of parameters, and have to read them again.
    for stage in pipeline.stages.values():
        stage.load_state_dict(stage.state_dict())


def _tensors(output: Any, learner: Learner) -> dict[str, Any]:
    tree = {"output": output, "learner": learner.complete_state()}
    return dict(leaves(tree, has_means=False))
