"""Compares predictions of a model that has made a few updates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.plugin.check import Check
from runner.proof.isolation import StepError
from runner.proof.verdict import Verdict
from runner.system.errors import RunnerError
from runner.verify.evaluation_checks import SIZES, answers, same_answers
from runner.verify.input_shapes import MOST_SHAPES
from runner.verify.unexercised import NOT_EXERCISED

if TYPE_CHECKING:
    from runner.verify.coverage import Coverage
    from runner.verify.pair import StagePair

# A compiler compiles again for every shape.
_TRACED_SHAPES = 2
"""Inputs of other shapes where a compiler traces a stage."""


class PredictionsCheck(Check):
    """Compares predictions on inputs of several sizes and shapes, in both modes of the
    modules.
    """

    name = "predictions"
    question = "Does the model predict the same, for inputs of any size?"
    catches = (
        "a prediction that depends on the batch size, on training mode, on shapes of the "
        "training, or on memory that comes again; one of nearly the same input; "
        "generation or sampling that is wrong for other lengths, steps or counts than "
        "the training's, or by less than what changes a symbol"
    )

    def applies(self, pair: StagePair) -> bool:
        """Returns False for stages that are inactive."""
        return not pair.is_inactive

    def cost(self, pair: StagePair) -> str:
        """Returns the sizes of the inputs."""
        sizes = ", ".join(map(str, SIZES))
        return (
            f"predictions of {sizes} samples, as far as the source can make them, "
            f"of up to {MOST_SHAPES} other shapes, and of requests"
        )

    def run(self, pair: StagePair, budget: Coverage) -> Verdict:
        """Compares bits or algebra; of a ``Statistical`` candidate only the form, and
        that numbers are finite.
        """
        shapes = pair.baseline.other_shapes
        if pair.is_traced:
            shapes = shapes[:_TRACED_SHAPES]
        builds = pair.builds(answers)
        queries = [*pair.baseline.questions, *shapes]
        try:
            return same_answers(*builds, queries, pair.contract)
        except (StepError, RunnerError):
            # A layer may refuse some of them, as batch normalization does a single sample.
            answered = [*pair.baseline.answered_questions, *shapes]
            if len(answered) == len(queries):
                raise
        verdict = same_answers(*builds, answered, pair.contract)
        refused = len(queries) - len(answered)
        limit = f"{refused} of {len(queries)} predictions, which the baseline refuses"
        return replace(verdict, evidence=verdict.evidence | {NOT_EXERCISED: [limit]})
