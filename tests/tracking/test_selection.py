import time
from datetime import datetime, timedelta

import pytest

from runner.system.errors import UsageError
from runner.tracking.keys import mlflow_key
from runner.tracking.run_table import FIELDS, table_rows
from runner.tracking.selection import select


def run(name, recipe="marl", started=0.0, **metrics):
    return {"name": name, "kind": "run", "recipe": recipe, "started": started, "metrics": metrics}


RUNS = [
    run("good", **{"eval/return": 12.5, "eval/loss": 0.1}),
    run("bad", **{"eval/return": -3.0, "eval/loss": "nan"}),
    run("begun"),
    run("damaged") | dict.fromkeys(("recipe", "started", "metrics")),
]


def names(*where, runs=RUNS, **asked):
    return [each["name"] for each in select(runs, where, **asked)]


@pytest.mark.parametrize(
    ("where", "meant"),
    [
        (["eval/return>0"], ["good"]),
        (["eval/return > -3"], ["good"]),
        (["eval/return>=-3"], ["good", "bad"]),
        (["eval/return<0"], ["bad"]),
        (["eval/return=12.5"], ["good"]),
        (["eval/return==12.5"], ["good"]),
        (["eval/return!=12.5"], ["bad"]),
        (["eval/return>=-3", "eval/loss<=1e-1"], ["good"]),
        (["eval/loss<inf"], ["good"]),
        ([], ["good", "bad", "begun", "damaged"]),
    ],
)
def test_conditions_are_met_by_the_newest_value_and_all_of_them(where, meant):
    assert names(*where) == meant


@pytest.mark.parametrize("text", ["eval/return", "eval/return>", ">0", "eval/return>much", "eval/return=>0", ""])
def test_what_is_no_condition_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="should be METRIC>NUMBER, for example eval/return>0"):
        names(text)


def test_a_metric_that_no_run_has_is_said_with_the_nearest():
    with pytest.raises(UsageError, match="no run has a metric 'eval/retrun' - did you mean 'eval/return'"):
        names("eval/retrun>0")
    assert names("eval/return>0", runs=[]) == []


@pytest.mark.parametrize("name", ["eval/acc@1", "eval/f1(macro)", "eval/50%", "eval/ü"])
def test_a_metric_is_selected_by_the_name_that_its_learner_gave_it(name):
    runs = [run("good", **{mlflow_key(name): 0.5}), run("bad", **{mlflow_key(name): 0.1})]
    assert names(f"{name}>0.2", runs=runs) == ["good"]
    assert names(f"{mlflow_key(name)} > 0.2", runs=runs) == ["good"]
    rows = table_rows([dict.fromkeys(FIELDS) | {"overrides": {}, "run_dir": "."} | row for row in runs], [name])
    assert rows == [{name: 0.5}, {name: 0.1}]


def test_a_recipe_is_named_whole_or_with_a_star():
    runs = [run("a", "marl_phase1"), run("b", "marl_phase2"), run("c", "digits")]
    assert names(runs=runs, recipe="marl_phase2") == ["b"]
    assert names(runs=runs, recipe="marl_*") == ["a", "b"]
    assert names(runs=runs, recipe="marl") == []


def test_an_age_or_a_date_says_since_when():
    now = time.time()
    runs = [run("new", started=now - 60), run("day", started=now - 86_000), run("old", started=now - 9 * 86_400)]
    assert names(runs=runs, since="2min") == ["new"]
    assert names(runs=runs, since="1d") == ["new", "day"]
    assert names(runs=runs, since="1.5 w") == ["new", "day", "old"]
    yesterday = datetime.now() - timedelta(days=2)
    assert names(runs=runs, since=f"{yesterday:%Y-%m-%d}") == ["new", "day"]
    assert names(runs=runs, since=f"{datetime.now() - timedelta(minutes=5):%Y-%m-%dT%H:%M}") == ["new"]


@pytest.mark.parametrize("text", ["yesterday", "3", "2 months", "2026-13-01"])
def test_what_is_no_time_is_refused_with_examples(text):
    with pytest.raises(UsageError, match="should be an age like 2d, 3h or 30min, or a date like 2026-01-31"):
        names(since=text)


def test_a_kind_can_be_asked_for():
    runs = [run("a"), run("b") | {"kind": "seeds"}, run("c") | {"kind": None}]
    assert names(runs=runs, kind="seeds") == ["b"]
    assert names(runs=runs) == ["a", "b", "c"]
