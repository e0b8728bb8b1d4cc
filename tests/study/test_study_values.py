import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.study.config import StudyConfig
from runner.study.intervals import union
from runner.study.logged_values import Point, bounded_values, excesses, logged_by, objectives
from runner.system.errors import UsageError
from runner.tracking.keys import mlflow_key

NAME = "eval/return"


def config(objective="maximize", constraints=None):
    return StudyConfig(
        kind="study", name="mine", recipe="r", space={"model.lr": {"float": [0.0, 1.0]}},
        objectives={NAME: objective}, constraints=constraints or {},
    )  # fmt: skip


def logged(*values, name=NAME, begin=100.0):
    """A metric that was logged every ten seconds."""
    return {name: [Point(begin + 10 * step, step, value) for step, value in enumerate(values)]}


def bounds(config, found):
    return excesses(config, bounded_values(config, found))


def value(objective, found, active=()):
    return objectives(config(objective), found, active)[NAME]


@pytest.mark.parametrize(
    ("direction", "which", "expected"),
    [
        ("maximize", "last", -3.0),
        ("maximize", "best", 4.0),
        ("minimize", "best", -5.0),
        ("maximize", "mean", 0.0),
        ("minimize", "mean", 0.0),
        ("minimize", "median", 1.0),
        ("minimize", "last", -3.0),
    ],
)
def test_the_value_that_counts_is_the_one_that_was_asked_for(direction, which, expected):
    found = logged(1.0, -5.0, 4.0, 3.0, -3.0)
    assert value({"direction": direction, "value": which}, found) == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9), st.sampled_from(["maximize", "minimize"]))
def test_the_best_is_a_value_that_no_other_beats(values, direction):
    best = value({"direction": direction, "value": "best"}, logged(*values))
    assert best == (max if direction == "maximize" else min)(values)


@pytest.mark.parametrize("which", ["best", "mean", "median"])
@pytest.mark.parametrize("values", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0), (1.0, 2.0, math.nan)])
def test_what_is_no_number_is_not_hidden_by_its_place_among_others(which, values):
    assert math.isnan(value({"direction": "maximize", "value": which}, logged(*values)))


def test_the_last_value_counts_also_if_it_is_no_number():
    assert math.isnan(value("maximize", logged(1.0, math.nan)))
    assert value("maximize", logged(math.nan, 1.0)) == 1.0


def test_a_metric_that_nobody_logged_is_an_error_that_names_the_nearest():
    with pytest.raises(UsageError, match="no metric 'eval/return' was logged - did you mean 'eval/returns'"):
        objectives(config(), {"eval/returns": [Point(1.0, 1, 2.0)]}, ())
    with pytest.raises(UsageError, match="no metric 'eval/x' was logged"):
        bounds(config(constraints={"eval/x": {"max": 1.0}}), logged(1.0))


@pytest.mark.parametrize(
    ("direction", "reach", "seconds"),
    [
        ("maximize", 2.0, 20.0),
        ("maximize", 2.5, 40.0),
        ("maximize", 9.0, None),
        ("minimize", 1.0, 20.0),
        ("minimize", 0.5, None),
    ],
)
def test_the_time_to_reach_something_ends_at_the_first_value_that_is_as_good(direction, reach, seconds):
    found = logged(*((1.0, 1.5, 2.0, 1.0, 3.0) if direction == "maximize" else (3.0, 1.5, 1.0, 2.0, 0.9)))
    assert value({"direction": direction, "reach": reach}, found, [(100.0, 150.0)]) == seconds


def test_progress_to_reach_something_is_in_the_unit_of_the_recipe():
    found = logged(1.0, 1.5, 2.0, 3.0)
    goal = {"direction": "maximize", "reach": 1.5, "reach_in": "progress"}
    assert value(goal, found, []) == found["eval/return"][1].step
    assert value({**goal, "reach": 9.0}, found, []) is None


def test_the_time_to_reach_something_leaves_out_when_nobody_trained():
    goal = {"direction": "maximize", "reach": 3.0}
    found = logged(1.0, 1.5, 2.0, 3.0)  # reached at 130
    assert value(goal, found, [(95.0, 105.0), (120.0, 140.0), (150.0, 160.0)]) == 20.0
    assert value(goal, found, [(95.0, 125.0), (120.0, 140.0)]) == 35.0


@pytest.mark.parametrize(
    ("bound", "excess"),
    [
        ({"max": 3.0}, -1.0),
        ({"max": 1.5}, 0.5),
        ({"max": 2.0}, 0.0),
        ({"min": 3.0}, 1.0),
        ({"min": -1.0}, -3.0),
        ({"min": 1.0, "max": 5.0}, -1.0),
        ({"min": 0.0, "max": 1.0}, 1.0),
    ],
)
def test_a_bound_is_about_the_last_value(bound, excess):
    assert bounds(config(constraints={"eval/x": bound}), logged(9.0, 2.0, name="eval/x")) == {"eval/x": excess}


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.floats(0, 1e3))
def test_a_bound_is_kept_exactly_within_its_ends(last, low, width):
    constraints = {NAME: {"min": low, "max": low + width}}
    assert (bounds(config(constraints=constraints), logged(last))[NAME] <= 0) == (low <= last <= low + width)


def test_what_is_no_number_keeps_no_bound():
    constraints = {"eval/x": {"min": 0.0, "max": 1.0}}
    assert bounds(config(constraints=constraints), logged(0.5, math.nan, name="eval/x")) == {"eval/x": math.inf}


def test_the_verdict_of_the_gate_is_no_bound():
    assert bounds(config(constraints={"verify": "pass"}), logged(1.0)) == {}


numbers = st.integers(-40, 40)
stretches = st.lists(st.tuples(numbers, st.integers(0, 12)).map(lambda each: (each[0], each[0] + each[1])), max_size=12)


@given(stretches)
def test_a_union_counts_every_second_once(intervals):
    covered = {second for begin, end in intervals for second in range(begin, end)}
    assert union(intervals) == len(covered)


@given(stretches, st.randoms(use_true_random=False))
def test_a_union_does_not_depend_on_the_order(intervals, shuffle):
    shuffled = list(intervals)
    shuffle.shuffle(shuffled)
    assert union(shuffled) == union(intervals)


@given(stretches, stretches)
def test_a_union_is_no_less_than_its_parts_and_no_more_than_their_sum(one, other):
    assert max(union(one), union(other)) <= union([*one, *other]) <= union(one) + union(other)


def test_a_history_is_read_from_a_spool_without_the_prefix(tmp_path):
    lines = [
        {"t": 1500, "step": 1, "metrics": {"seed_7/eval/return": 1.0, "seed_7/train/loss": 2.0}},
        {"t": 2500, "step": 2, "metrics": {"seed_7/eval/return": "nan"}},
        {"t": 3500, "step": 3, "metrics": {"seed_7/eval/return": 3.0}},
    ]
    spool = tmp_path / "spool.jsonl"
    spool.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = logged_by(spool, "seed_7/")
    assert found.keys() == {"eval/return", "train/loss"}
    assert [(point.at, point.step) for point in found["eval/return"]] == [(1.5, 1), (2.5, 2), (3.5, 3)]
    assert math.isnan(found["eval/return"][1].value)
    assert logged_by(tmp_path / "absent.jsonl", "") == {}


@pytest.mark.parametrize("name", ["eval/odd@1", "eval/a<5", "eval/" + "x" * 260, "eval/plain"])
@pytest.mark.parametrize("prefix", ["", "seed_7/"])
def test_a_metric_is_read_by_its_name_also_where_mlflow_has_another(name, prefix, tmp_path):
    key = mlflow_key(prefix + name)
    spool = tmp_path / "spool.jsonl"
    spool.write_text(json.dumps({"t": 1500, "step": 1, "metrics": {key: 2.0}}) + "\n")
    assert logged_by(spool, prefix, [name])[name] == [Point(1.5, 1, 2.0)]
