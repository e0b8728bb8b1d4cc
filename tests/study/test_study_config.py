import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runner.study.config import ParameterConfig, StudyConfig

LEAST = {
    "kind": "study",
    "name": "mine",
    "recipe": "marl_phase2",
    "space": {"model.lr": {"float": [0.1, 1.0]}},
    "objectives": {"eval/return": "maximize"},
}


def config(**settings):
    return StudyConfig.model_validate_json(json.dumps(LEAST | settings), strict=True)


def parameter(**settings):
    return ParameterConfig.model_validate_json(json.dumps(settings), strict=True)


def refused(make, **settings):
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    return "; ".join(error["msg"] for error in caught.value.errors())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": {"kind": "random", "startup": 3}}, "startup has no effect with random"),
        ({"pruner": {"kind": "hyperband", "startup": 3}}, "startup has no effect with hyperband"),
        ({"pruner": {"kind": "median"}, "seeds": 2}, "median compares single trainings; with seeds use wilcoxon"),
        (
            {"pruner": {"kind": "median"}, "objectives": {"eval/return": {"direction": "maximize", "reach": 1.0}}},
            "median compares values of a metric, not the time to one",
        ),
        (
            {"objectives": {"eval/return": {"direction": "maximize", "reach_in": "progress"}}},
            "reach_in has no effect without reach",
        ),
        (
            {"objectives": {"eval/return": {"direction": "maximize", "reach": 1.0, "value": "best"}}},
            "value has no effect with reach",
        ),
    ],
)
def test_a_setting_that_nothing_would_read_is_an_error(settings, message):
    assert message in refused(config, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "should have one of float, int and choice, got none"),
        ({"float": [0, 1], "choice": [1, 2]}, "got float and choice"),
        ({"float": [1, 1]}, "the range starts at 1 and ends at 1"),
        ({"int": [3, 2]}, "it should start below its end"),
        ({"int": [0, 8], "log": True}, "a logarithmic range should start above 0, not at 0"),
        ({"float": [-1, 1], "log": True}, "not at -1"),
        ({"float": [1, 2], "log": True, "step": 0.5}, "a range has either log or step"),
        ({"int": [1, 9], "step": 1.5}, "the step of an integer should be an integer, not 1.5"),
        ({"float": [0, 1], "step": -0.1}, "greater than 0"),
        ({"float": [0.1, 1.0], "step": 0.4}, "steps of 0.4 from 0.1 do not reach 1: end the range at a step"),
        ({"int": [16, 100], "step": 16}, "steps of 16 from 16 do not reach 100"),
        ({"choice": ["on"]}, "at least 2 items"),
        ({"choice": ["off", "on"], "log": True}, "log and step belong to a range"),
        ({"choice": [1, 2], "step": 1}, "log and step belong to a range"),
        ({"choice": ["a", "b", "a"]}, "a and a are the same choice: leave one out"),
        ({"choice": [1, 2, 1.0]}, "1 and 1.0 are the same choice"),
        ({"choice": [0, False]}, "0 and false are the same choice"),
        ({"choice": [math.nan, math.nan, 1]}, ".nan and .nan are the same choice"),
        ({"choice": [[math.nan], [math.nan]]}, "[.nan] and [.nan] are the same choice"),
        ({"choice": ["[8]", [8]]}, "'[8]' and [8] are stored as the same text, [8]: leave one out"),
        ({"choice": [{"a": 1}, "{a: 1}"]}, "are stored as the same text, {a: 1}"),
        ({"choice": [{"dtype": "bf16"}, "off", {"dtype": "bf16"}]}, "are the same choice"),
        ({"float": [0]}, "at least 2 items"),
        ({"float": [0, 1, 2]}, "at most 2 items"),
        ({"int": [0, 1.5]}, "valid integer"),
        ({"float": ["0", 1]}, "valid number"),
        ({"floats": [0, 1]}, "Extra inputs"),
    ],
)
def test_a_range_or_a_choice_that_cannot_be_searched_is_refused(settings, message):
    assert message in refused(parameter, **settings)


@given(
    low=st.integers(-50, 50),
    step=st.sampled_from([0.1, 0.25, 0.3, 1, 2.5, 7]),
    steps=st.integers(1, 40),
    scale=st.sampled_from([1, 1000]),
)
def test_a_range_of_whole_steps_is_taken_whatever_its_rounding(low, step, steps, scale):
    begin = low / 10
    end = round(begin + steps * step * scale, 10)
    assert parameter(float=[begin, end], step=step * scale).float == [begin, end]


def test_a_value_that_is_no_number_is_no_end_of_a_range():
    with pytest.raises(ValidationError):
        ParameterConfig(float=[0.0, float("inf")])


def test_an_objective_can_be_its_direction_alone():
    short, long = config(), config(objectives={"eval/return": {"direction": "maximize"}})
    assert short.model_dump() == long.model_dump()
    assert short.objectives["eval/return"].reach is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objectives": {}}, "at least 1 item"),
        ({"objectives": {"eval/return": "up"}}, "'maximize' or 'minimize'"),
        ({"space": {}}, "at least 1 item"),
        ({"seeds": 0}, "greater than or equal to 1"),
        ({"seed": 2**32}, "less than 4294967296"),
        ({"name": "my study"}, "should match pattern"),
        ({"name": "../up"}, "should match pattern"),
        ({"name": "a" * 101}, "at most 100 characters"),
        ({"constraints": {"eval/return": {}}}, "should have min, max or both"),
        ({"constraints": {"eval/return": {"min": 3, "max": 1}}}, "min 3 is above max 1: no value is within"),
        ({"constraints": {"eval/return": "pass"}}, "constraints.eval/return should be a mapping with min or max"),
        ({"constraints": {"verify": {"max": 1}}}, "constraints.verify should be 'pass' or 'no_fail'"),
        ({"constraints": {"verify": "sure"}}, "'pass' or 'no_fail'"),
        ({"pruner": {"kind": "wilcoxon"}}, "pruner.kind: wilcoxon compares seeds, and seeds is 1"),
        ({"retries": -1}, "greater than or equal to 0"),
        ({"limits": {"memory_gib": 0}}, "greater than 0"),
        ({"budget": {"trials": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_a_study_cannot_mean_is_refused(settings, message):
    assert message in refused(config, **settings)


@pytest.mark.parametrize("kind", ["median", "hyperband", "wilcoxon"])
def test_a_pruner_cannot_compare_by_several_objectives(kind):
    several = {"eval/return": "maximize", "eval/steps_to_goal": "minimize"}
    message = refused(config, objectives=several, pruner={"kind": kind}, seeds=3)
    assert message.endswith(f"pruner.kind: {kind} compares by one objective, and there are several")


@pytest.mark.parametrize(
    ("settings", "timed"),
    [
        ({"objectives": {"perf/env_steps_per_second": "maximize"}}, "perf/env_steps_per_second"),
        ({"objectives": {"eval/return": {"direction": "maximize", "reach": -20}}}, "eval/return"),
        ({"constraints": {"perf/update_ms": {"max": 5}}}, "perf/update_ms"),
    ],
)
def test_what_is_a_matter_of_time_is_not_measured_in_parallel(settings, timed):
    assert config(**settings).timed == [timed]
    message = refused(config, **settings, budget={"parallel": 2})
    assert f"budget.parallel is 2, but '{timed}' is a speed" in message
    assert message.endswith("use parallel: 1")


def test_what_is_no_matter_of_time_may_be_measured_in_parallel():
    assert config(budget={"parallel": 4}).timed == []


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "median"),
        ({"seeds": 3}, "wilcoxon"),
        ({"objectives": {"eval/a": "maximize", "eval/b": "minimize"}}, "off"),
        ({"objectives": {"eval/a": "maximize", "eval/b": "minimize"}, "seeds": 3}, "off"),
        ({"objectives": {"eval/a": {"direction": "maximize", "reach": 1.0}}}, "off"),
        ({"pruner": {"kind": "hyperband"}}, "hyperband"),
        ({"pruner": {"kind": "off"}, "seeds": 3}, "off"),
    ],
)
def test_auto_is_the_pruner_that_fits(settings, kind):
    assert config(**settings).pruner_kind == kind


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"constraints": {"verify": "no_fail", "perf/update_ms": {"max": 5}}, "seeds": 2, "seed": 7},
        {"space": {"optimization.amp": {"choice": ["off", {"dtype": "bf16"}]}, "data.envs": {"int": [1, 9]}}},
        {"objectives": {"eval/a": {"direction": "minimize", "value": "best"}}, "budget": {"seconds": 60}},
    ],
)
def test_what_was_written_down_reads_back_as_the_same_settings(settings):
    whole = config(**settings)
    written = json.loads(json.dumps(whole.model_dump(mode="json")))
    assert StudyConfig.model_validate(written).model_dump() == whole.model_dump()
