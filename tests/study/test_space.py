import json
import math
import random
from functools import reduce

import optuna
import pytest
from faces import FakeCatalog, write_recipe
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump_inline
from runner.recipe.loader import assignments, layers, load, merge
from runner.study.config import OFF, ParameterConfig, label
from runner.study.space import Parameter, Space, is_on

KINDS = "abcdef"
SWITCH = ParameterConfig(choice=["off", "on"])
RANGE = ParameterConfig(int=[1, 9])


@st.composite
def spaces(draw):
    """Parameters in the order of some file, what stages require, and which are on in the recipe."""
    requirements = {kind: draw(st.sets(st.sampled_from(KINDS[:i]))) if i else set() for i, kind in enumerate(KINDS)}
    switched = draw(st.sets(st.sampled_from(KINDS), min_size=1))
    paths = [f"optimization.{kind}" for kind in switched]
    paths += [f"optimization.{kind}.size" for kind in draw(st.sets(st.sampled_from(KINDS)))]
    paths += draw(st.sampled_from([[], ["model.lr"], ["model.lr", "train.batch_size"]]))
    searched = {path: SWITCH if is_switch(path) else RANGE for path in draw(st.permutations(paths))}
    return searched, requirements, draw(st.sets(st.sampled_from(KINDS)))


def space_of(searched, requirements, on):
    return Space.of(searched, requirements, on)


def answer(seed):
    """An answer for every setting, the same whenever it is asked."""

    def ask(parameter):
        draw = random.Random(f"{seed} {parameter.path}")
        return draw.choice(["off", "on"]) if parameter.stage else draw.randint(1, 9)

    return ask


def on_in(settled, on):
    switched = {path.removeprefix("optimization."): is_on(value) for path, value in settled.items() if is_switch(path)}
    return {kind for kind in KINDS if switched.get(kind, kind in on)}


def is_switch(path):
    return path.startswith("optimization.") and path.count(".") == 1


@given(spaces(), st.integers(0, 99))
def test_no_stage_that_is_switched_is_on_without_what_it_requires(made, seed):
    _, requirements, on = made
    space = space_of(*made)
    on_now = on_in(space.settle(answer(seed)), on)
    switched = space.switches.keys()
    assert all(requirements[kind] <= on_now for kind in on_now & switched)


@given(spaces(), st.integers(0, 99))
def test_a_stage_is_what_was_answered_wherever_it_can_be(made, seed):
    _, requirements, on = made
    space, asked = space_of(*made), []

    def ask(parameter):
        asked.append(parameter.path)
        return answer(seed)(parameter)

    settled = space.settle(ask)
    on_now = on_in(settled, on)
    for parameter in filter(lambda each: each.stage, space.parameters):
        possible = requirements[parameter.stage] <= on_now
        assert (parameter.path in asked) == possible
        assert settled[parameter.path] == (answer(seed)(parameter) if possible else OFF)


@given(spaces(), st.integers(0, 99))
def test_settings_of_a_stage_exist_exactly_where_it_is_on(made, seed):
    searched, _, on = made
    settled = space_of(*made).settle(answer(seed))
    on_now = on_in(settled, on)
    for path in searched:
        keys = path.split(".")
        exists = len(keys) < 3 or keys[1] in on_now
        assert (path in settled) == exists


@given(spaces(), st.integers(0, 99), st.randoms(use_true_random=False))
def test_what_is_settled_does_not_depend_on_the_order_in_the_file(made, seed, shuffle):
    searched, requirements, on = made
    shuffled = list(searched.items())
    shuffle.shuffle(shuffled)
    one, other = (space_of(each, requirements, on) for each in (searched, dict(shuffled)))
    assert one.settle(answer(seed)) == other.settle(answer(seed))
    assert sorted(map(repr, one.parameters)) == sorted(map(repr, other.parameters))


@given(spaces())
def test_switches_come_first_and_none_before_what_it_needs(made):
    searched, requirements, _ = made
    arranged = space_of(*made).parameters
    assert sorted(each.path for each in arranged) == sorted(searched)
    switches = [each.stage for each in arranged if each.stage]
    assert [each.stage for each in arranged[: len(switches)]] == switches
    for position, kind in enumerate(switches):
        assert requirements[kind].intersection(switches) <= set(switches[:position])


def test_a_setting_is_asked_for_only_where_it_exists():
    space = space_of({"optimization.a.size": RANGE, "optimization.a": SWITCH}, {"a": ()}, ())
    asked = []
    assert space.settle(lambda each: asked.append(each.path) or "off") == {"optimization.a": "off"}
    assert asked == ["optimization.a"]


def test_stages_that_need_each_other_are_arranged_all_the_same():
    searched = {"optimization.a": SWITCH, "optimization.b": SWITCH}
    arranged = space_of(searched, {"a": ("b",), "b": ("a",)}, ()).parameters
    assert sorted(each.path for each in arranged) == ["optimization.a", "optimization.b"]


def texts():
    return st.text(st.characters(codec="utf-8"), max_size=12)


def values():
    """What a setting of a recipe may be."""
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-(10**15), 10**15), st.floats(allow_nan=False, allow_infinity=False),
        texts(), st.sampled_from(["on", "off", "1e-3", "null", "a: b", "# no", "[8]", " x ", "'", '"', "="]),
    )  # fmt: skip
    keys = st.text("abcxyz_", min_size=1, max_size=6)
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(value=values())
def test_an_assignment_reads_back_as_the_value_that_it_was_made_of(value, tmp_path_factory):
    path = write_recipe(tmp_path_factory.getbasetemp(), "model: {net: 1}\n", "assigned.yaml")
    (text,) = assignments({"model.new": value})
    problems = []
    read = reduce(merge, layers(path, [text], problems)).get("model").get("new").plain()
    assert (problems, read, json.dumps(read)) == ([], value, json.dumps(value))


@given(
    lr=st.floats(1e-12, 1e6),
    envs=st.integers(1, 10**9),
    hidden=st.lists(st.integers(1, 99), min_size=1, max_size=9),
    cache=st.sampled_from(["off", "on", {"size": 8}]),
)
def test_a_recipe_has_the_values_that_were_assigned(lr, envs, hidden, cache, tmp_path_factory):
    path = write_recipe(tmp_path_factory.getbasetemp(), name="whole.yaml")
    chosen = {"model.lr": lr, "data.envs": envs, "model.hidden": hidden, "optimization.cache": cache}
    recipe = load(path, assignments(chosen), FakeCatalog())
    assert (recipe.model.lr, recipe.data.envs, recipe.model.hidden) == (lr, envs, hidden)
    assert recipe.values()["optimization"]["cache"] == ({"size": 3} if cache == "on" else cache)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("on", "on"), (3, 3), (None, None), (True, True), ({"dtype": "bf16"}, "{dtype: bf16}"), ([8, 8], "[8, 8]")],
)
def test_a_choice_is_kept_as_a_scalar(choice, expected):
    assert label(choice) == expected


@pytest.mark.parametrize(("value", "on"), [("off", False), (False, False), ("on", True), (True, True), ({}, True)])
def test_a_stage_is_on_unless_it_is_off(value, on):
    assert is_on(value) == on


@pytest.mark.parametrize(
    ("settings", "inside", "outside"),
    [
        ({"float": [0.5, 2.0]}, [0.5, 1, 2.0], [0.49, 2.1, True, "1", None]),
        ({"float": [0.0, 1.0], "step": 0.1}, [0, 0.1, 0.3, 0.7, 1.0], [0.05, 0.99]),
        ({"int": [1, 9]}, [1, 5, 9], [0, 10, 2.5]),
        ({"int": [1, 9], "step": 4.0}, [1, 5, 9], [2, 4]),
    ],
)
def test_a_range_has_its_steps_and_nothing_else(settings, inside, outside):
    parameter = ParameterConfig(**settings)
    assert [parameter.has(value) for value in inside] == [True] * len(inside)
    assert [parameter.has(value) for value in outside] == [False] * len(outside)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"choice": ["off", "on", {"size": 2}]}, 3),
        ({"int": [1, 9]}, 9),
        ({"int": [1, 9], "step": 4.0}, 3),
        ({"float": [0.0, 1.0], "step": 0.1}, 11),
        ({"float": [0.1, 0.7], "step": 0.1}, 7),
        ({"float": [0.0, 1.0]}, math.inf),
        ({"int": [1, 4], "log": True}, 4),
    ],
)
def test_configurations_are_counted(settings, count):
    parameters = (Parameter("model.lr", ParameterConfig(**settings)), Parameter("optimization.a", SWITCH))
    assert Space(parameters, frozenset()).configurations == 2 * count


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"choice": ["off", {"dtype": "bf16"}, 3]}, "one of off, {dtype: bf16}, 3"),
        ({"float": [1e-4, 3e-3], "log": True}, "0.0001 to 0.003, logarithmic"),
        ({"int": [32, 256], "step": 32.0}, "32 to 256, in steps of 32"),
        ({"int": [1, 2]}, "1 to 2"),
    ],
)
def test_a_setting_is_described_in_a_line(settings, text):
    assert str(ParameterConfig(**settings)) == text


@pytest.mark.parametrize(
    "settings",
    [
        {"float": [1e-4, 1e-2], "log": True},
        {"float": [0.0, 1.0], "step": 0.1},
        {"int": [1, 64], "log": True},
        {"int": [32, 256], "step": 32.0},
    ],
)
def test_what_is_suggested_is_in_the_range_and_stays_what_it_is(settings):
    parameter = Parameter("model.lr", ParameterConfig(**settings))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(20):
        trial = study.ask()
        value = parameter.suggested(trial)
        assert parameter.config.has(value)
        assert type(value) is (int if "int" in settings else float)
        assert parameter.suggested(trial) == value


def test_a_choice_is_suggested_as_the_file_has_it():
    choices = ["off", True, {"dtype": "bf16"}, [8, 8], None, math.inf, -math.inf]
    parameter = Parameter("optimization.a", ParameterConfig(choice=choices))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    suggested = [parameter.suggested(study.ask()) for _ in range(60)]
    assert all(choice in suggested for choice in choices)
    assert all(value in choices for value in suggested)
    kept = {trial.params["optimization.a"] for trial in study.trials}
    assert kept == {label(choice) for choice in choices}


def test_a_choice_that_is_nan_is_suggested_again_after_an_interruption(tmp_path):
    parameter = Parameter("model.a", ParameterConfig(choice=[math.nan, [math.nan]]))
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.enqueue_trial({parameter.path: math.nan})
    study.enqueue_trial({parameter.path: "[.nan]"})
    for expected in (".nan", "[.nan]"):
        trial = study.ask()
        stored = optuna.trial.Trial(study, trial._trial_id)
        values = [parameter.suggested(trial), parameter.suggested(stored)]
        assert [dump_inline(value) for value in values] == [expected, expected]
