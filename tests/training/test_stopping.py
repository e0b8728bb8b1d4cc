"""A training ends before its length if its metric no longer improves, is good enough, or time is over."""

import itertools
import math
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import tiny, train_here
from toy_runs import Notes, toy_pipeline, trained

from runner.api import EndTraining
from runner.cli.closing_table import show
from runner.plugin.contract import Objective
from runner.plugin.progress import Progress
from runner.recipe.stopping import StopConfig
from runner.system.console import Console
from runner.system.errors import RunnerError
from runner.tracking import RunFolder
from runner.training import stopping
from runner.training.loop import Loop
from runner.training.signals import Stop
from runner.training.stopping import EarlyStop

LOSS = Objective("loss", "minimize")
ACCURACY = Objective("accuracy", "maximize")
NOT_FINITE = (math.nan, math.inf, -math.inf)
VALUES = st.lists(st.one_of(st.floats(-5, 5), st.sampled_from(NOT_FINITE)), min_size=1, max_size=30)


def end_of(values, objective=LOSS, name="loss", **settings):
    """Returns the number of evaluations after which the training ends and the reason; None if it goes on."""
    stop = EarlyStop(StopConfig(**settings), objective)
    for number, value in enumerate(values, 1):
        progress = Progress("updates", 1000, updates=10 * number)
        stop.observe({name: value}, progress)
        if stop.ends(progress):
            return number, stop.reason
    return None


def test_it_ends_after_evaluations_without_an_improvement():
    expected = "eval/loss did not improve in 2 evaluations; the best is 0.5 after 20 updates"
    assert end_of([1.0, 0.5, 0.6, 0.7, 0.1], patience=2) == (4, expected)
    assert end_of([1.0, 0.5, 0.6, 0.4, 0.5, 0.3], patience=2) is None


def test_a_tie_and_less_than_the_least_difference_are_no_improvement():
    assert end_of([1.0, 1.0, 1.0], patience=2)[0] == 3
    assert end_of([1.0, 0.95, 0.91], patience=2, min_delta=0.1)[0] == 3
    assert end_of([1.0, 0.95, 0.8, 0.75, 0.72], patience=2, min_delta=0.1)[0] == 5


def test_more_is_better_where_the_objective_or_the_recipe_says_so():
    assert end_of([0.1, 0.2, 0.3], ACCURACY, "accuracy", patience=1) is None
    assert end_of([0.3, 0.2], ACCURACY, "accuracy", patience=1)[0] == 2
    settings = {"metric": "eval/words", "direction": "maximize"}
    assert end_of([1, 2, 3], ACCURACY, "words", patience=1, **settings) is None


def test_an_evaluation_without_a_value_is_one_without_an_improvement():
    assert end_of([math.nan, math.nan], patience=2) == (
        2,
        "eval/loss did not improve in 2 evaluations; it never had a finite value",
    )
    assert end_of([1.0, math.nan, 0.9, math.nan], patience=2) is None


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("objective", [LOSS, Objective("loss", "maximize")])
@given(
    values=st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    number=st.integers(0, 12),
    smoothing=st.sampled_from([0.0, 0.5]),
    reach=st.floats(-5, 5),
)
def test_a_value_that_is_not_finite_only_counts_as_an_evaluation(bad, objective, values, number, smoothing, reach):
    settings = {"smoothing": smoothing, "objective": objective}
    number = min(number, len(values))
    without = end_of(values, reach=reach, **settings)
    with_bad = end_of([*values[:number], bad, *values[number:]], reach=reach, **settings)
    if without is not None and without[0] > number:
        without = (without[0] + 1, without[1])
    assert with_bad == without
    # Directly before an end, it is one more evaluation without an improvement.
    repeated = [values[0], bad, values[0]]
    assert end_of(repeated, patience=2, **settings)[0] == 3


@pytest.mark.parametrize("objective", [LOSS, Objective("loss", "maximize")])
def test_a_state_of_an_earlier_version_with_an_infinite_value_recovers(objective):
    stop = EarlyStop(StopConfig(patience=2, smoothing=0.5), objective)
    stop.load_state_dict(stop.state_dict() | {"best": math.inf, "average": math.inf})
    for number, value in enumerate([3.0, 3.0 - objective.sign, 3.0 + 3 * objective.sign], 1):
        progress = Progress("updates", 1000, updates=number)
        stop.observe({"loss": value}, progress)
        assert not stop.ends(progress)


def test_it_ends_at_a_value():
    assert end_of([1.0, 0.5, 0.2], reach=0.5) == (2, "eval/loss has reached 0.5")
    assert end_of([0.5, 0.969, 0.97], ACCURACY, "accuracy", reach=0.97)[0] == 3
    assert end_of([math.nan, 0.9], reach=0.5) is None


def test_the_moving_average_is_compared():
    assert end_of([1.0, 0.4, 0.4], reach=0.5) == (2, "eval/loss has reached 0.4")
    assert end_of([1.0, 0.4, 0.4, 0.4], reach=0.5, smoothing=0.5)[0] == 4
    assert end_of([1.0, math.nan, 0.0], reach=0.5, smoothing=0.5) == (3, "eval/loss has reached 0.5")


def test_it_does_not_end_before_the_least_length():
    assert end_of([0.1, 1.0, 1.0, 1.0, 1.0], patience=2, not_before=50)[0] == 5
    assert end_of([0.1, 0.2], reach=0.5, not_before=20)[0] == 2


def test_time_is_counted_over_interruptions(monkeypatch):
    clock = itertools.count(0, 10).__next__
    monkeypatch.setattr(stopping, "perf_counter", clock)
    progress = Progress("updates", 1000, updates=1)
    stop = EarlyStop(StopConfig(seconds=25), LOSS)
    assert [stop.ends(progress), stop.ends(progress)] == [False, False]
    resumed = EarlyStop(StopConfig(seconds=25), LOSS)
    resumed.load_state_dict(stop.state_dict())
    assert resumed.ends(progress)
    assert resumed.reason == "25 s of training are over"


def test_a_metric_that_nobody_measures_is_an_error_with_those_that_are():
    expected = "train.stop.metric: the evaluation has no 'eval/los'; it has eval/accuracy, eval/loss"
    stop = EarlyStop(StopConfig(patience=1, metric="eval/los", direction="minimize"), LOSS)
    with pytest.raises(RunnerError) as caught:
        stop.observe({"loss": 1.0, "accuracy": 0.5}, Progress("updates", 10))
    assert str(caught.value) == expected


@given(VALUES, st.integers(1, 4), st.floats(0, 0.9), st.data())
def test_an_interruption_changes_nothing(values, patience, smoothing, data):
    settings = {"patience": patience, "smoothing": smoothing}
    expected = end_of(values, **settings)
    cut = data.draw(st.integers(0, len(values)))
    stop = EarlyStop(StopConfig(**settings), LOSS)
    actual = None
    for number, value in enumerate(values, 1):
        if number - 1 == cut:
            resumed = EarlyStop(StopConfig(**settings), LOSS)
            resumed.load_state_dict(stop.state_dict())
            stop = resumed
        progress = Progress("updates", 1000, updates=10 * number)
        stop.observe({"loss": value}, progress)
        if stop.ends(progress):
            actual = number, stop.reason
            break
    assert actual == expected


@given(VALUES, st.integers(1, 4))
def test_it_ends_at_the_first_stretch_without_an_improvement(values, patience):
    best = math.inf
    stretch = 0
    expected = None
    for number, value in enumerate(values, 1):
        is_better = math.isfinite(value) and value < best
        stretch = 0 if is_better else stretch + 1
        best = value if is_better else best
        if stretch >= patience:
            expected = number
            break
    actual = end_of(values, patience=patience)
    assert (actual and actual[0]) == expected


def ended(folder, *sets):
    """Trains a toy whose loss falls, and returns its loop and what was logged."""
    return trained(folder, toy_pipeline(folder, "train.updates=40", "train.evaluate_every=4", *sets))


def evaluations(notes, name="eval/loss"):
    return [step for step, _ in notes.points[name]]


def test_a_training_ends_as_finished_with_the_evaluation_that_decided(tmp_path):
    loop, notes = ended(tmp_path, "train.stop={reach: 100, not_before: 8}")
    assert loop.complete
    assert loop.progress.done == 8
    assert evaluations(notes) == [4, 8]
    assert loop.ended_early.startswith("eval/loss has reached ")
    assert loop.saved_position == loop.progress.position


def test_a_condition_that_is_never_met_changes_nothing(tmp_path):
    plain, plain_notes = ended(tmp_path)
    loop, notes = ended(tmp_path, "train.stop={patience: 40}")
    assert (loop.ended_early, loop.progress.done) == ("", 40)
    assert notes.points["eval/loss"] == plain_notes.points["eval/loss"]
    for name, value in plain.pipeline.learner.named_parameters():
        assert torch.equal(value, dict(loop.pipeline.learner.named_parameters())[name])


def test_a_condition_that_is_met_at_the_end_is_not_early(tmp_path):
    loop, _ = ended(tmp_path, "train.stop={reach: 100, not_before: 39}")
    assert (loop.complete, loop.ended_early) == (True, "")


@pytest.mark.parametrize("owner", ["source", "learner"])
def test_a_plugin_ends_a_training(owner, tmp_path):
    pipeline = toy_pipeline(tmp_path, "train.updates=40", "train.evaluate_every=40")

    def ending(step):
        def ended_step(*arguments):
            if pipeline.progress.updates == 5:
                raise EndTraining("enough words")
            return step(*arguments)

        return ended_step

    pipeline.slots.wrap("draw" if owner == "source" else "update", ending)
    loop, notes = trained(tmp_path, pipeline)
    assert (loop.complete, loop.progress.updates, loop.ended_early) == (True, 5, "enough words")
    assert evaluations(notes) == [5]


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("name", ["digits_classifier", "shakespeare_gpt", "marl_baseline"])
def test_the_run_is_finished_and_says_why_it_ended(name, capsys):
    recipe = tiny(name)
    unit, length = recipe.train.length
    sets = (f"train.stop={{reach: {1e9 * -recipe.objective.sign}}}", f"train.{unit}={3 * length}")
    result = train_here(name, *sets, f"train.evaluate_every={length}")
    assert result.status == "FINISHED"
    assert result.ended_early.startswith(f"eval/{recipe.objective.name} has reached ")
    show(result, (), Console(width=200))
    assert "early: eval/" in capsys.readouterr().out
    record = RunFolder(Path(result.run_dir)).record()
    assert (record.status, record.reason) == ("FINISHED", result.ended_early)


def test_a_resumed_training_ends_where_the_uninterrupted_one_does(tmp_path):
    sets = ("train.updates=60", "train.evaluate_every=2", "train.stop={patience: 4, min_delta: 0.4, smoothing: 0.3}")
    expected, _ = trained(tmp_path / "whole", toy_pipeline(tmp_path, *sets))
    assert "did not improve in 4 evaluations" in expected.ended_early
    pipeline = toy_pipeline(tmp_path, *sets)
    stop = Stop()

    def interrupting(step):
        def update(*arguments):
            if pipeline.progress.updates == expected.progress.updates - 3:
                stop.received = signal.SIGTERM
            return step(*arguments)

        return update

    pipeline.slots.wrap("update", interrupting)
    notes = Notes()
    interrupted = Loop(pipeline, tmp_path / "interrupted", notes, notes, stop)
    interrupted.run()
    assert (interrupted.complete, interrupted.ended_early) == (False, "")
    resumed = Loop(toy_pipeline(tmp_path, *sets), tmp_path / "resumed", notes, notes, Stop())
    resumed.load_state_dict(interrupted.state_dict())
    resumed.run()
    assert (resumed.ended_early, resumed.progress.done) == (expected.ended_early, expected.progress.done)
    for name, value in expected.pipeline.learner.named_parameters():
        assert torch.equal(value, dict(resumed.pipeline.learner.named_parameters())[name])


def test_an_evaluation_before_the_first_update_ends_nothing():
    stop = EarlyStop(StopConfig(reach=100), LOSS)
    stop.observe({"loss": 1.0}, Progress("env_steps", 1000, env_steps=500))
    assert not stop.ends(Progress("env_steps", 1000, env_steps=500))
