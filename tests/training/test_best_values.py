"""The checkpoints that ``train.keep`` selects, compared with a list of all evaluations."""

import math
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.plugin.contract import Objective
from runner.recipe.keeping import KeepConfig
from runner.system.errors import RunnerError
from runner.training import checkpoint
from runner.training.best_values import BestValues
from runner.training.checkpoint import Writer

LOSS = Objective("loss", "minimize")
DIRECTIONS = {"eval/loss": "minimize", "eval/accuracy": "maximize"}
# Few different values, so that many are equal.
EVALUATIONS = st.lists(
    st.fixed_dictionaries({
        "loss": st.sampled_from([0.1, 0.5, 0.9, 2.0, math.nan]),
        "accuracy": st.sampled_from([0.0, 0.25, 0.5, 1.0, math.inf]),
    }),
    min_size=1,
    max_size=12,
)  # fmt: skip


def best_steps(evaluations, name, sign, count):
    """Returns the steps of the best finite values, of equal ones the latest."""
    scores = [
        (sign * values[name], step) for step, values in enumerate(evaluations, start=1) if math.isfinite(values[name])
    ]
    return {step for _, step in sorted(scores, reverse=True)[:count]}


@given(EVALUATIONS, st.integers(1, 4), st.integers(2, 4), st.integers(0, 11))
def test_the_best_and_the_newest_stay(tmp_path_factory, evaluations, best, last, interruption):
    folder = tmp_path_factory.mktemp("checkpoints")
    config = KeepConfig(best=best, last=last, metrics=DIRECTIONS)
    values = BestValues(config, LOSS)
    saved = []
    with patch.object(checkpoint, "sync"), patch.object(checkpoint, "_durable", return_value="0" * 64):
        writer = Writer(folder, keep=config)
        for step, metrics in enumerate(evaluations, start=1):
            if step == interruption:
                state = values.state_dict()
                values = BestValues(config, LOSS)
                values.load_state_dict(state)
            scores = values.scores(metrics)
            if values.add(scores):
                saved.append(step)
                writer.save(step, {}, scores.get("loss"), scores=scores)
        writer.wait()
    expected = {
        *best_steps(evaluations, "loss", -1, best),
        *best_steps(evaluations, "accuracy", 1, best),
        *saved[-last:],
    }
    assert {int(path.name.removeprefix("step-")) for path in checkpoint.checkpoints(folder)} == expected


def test_the_objective_is_compared_unless_metrics_are_named():
    values = BestValues(KeepConfig(best=2), LOSS)
    scores = [values.scores({"loss": loss, "accuracy": 1.0}) for loss in (3.0, 2.0, 2.5, 1.0)]
    assert scores == [{"loss": -3.0}, {"loss": -2.0}, {"loss": -2.5}, {"loss": -1.0}]
    assert [values.add(score) for score in (*scores, {"loss": -2.2}, {"loss": -2.0})] == [True] * 4 + [False, True]


def test_a_metric_that_nobody_measures_is_an_error_with_those_that_are():
    values = BestValues(KeepConfig(metrics={"eval/los": "minimize"}), LOSS)
    with pytest.raises(RunnerError) as caught:
        values.scores({"loss": 1.0, "accuracy": 0.5})
    expected = "train.keep.metrics: the evaluation has no 'eval/los'; it has eval/accuracy, eval/loss"
    assert str(caught.value) == expected
