"""Every setting has the same value in a recipe, in child processes, in locks and in what is printed."""

import json
import math
from typing import Annotated, Any, ClassVar

import pytest
from faces import RECIPE, FakeCatalog, Net, write_recipe
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from runner.recipe.dumping import dump, dump_inline, is_same
from runner.recipe.loader import assignments, from_values, load, secret_assignments
from runner.recipe.rendering import render
from runner.recipe.resumption import changes
from runner.recipe.yaml_nodes import RecipeError, parse

INFINITY = math.inf


class Open(Net):
    """A net with settings of any type."""

    kind: ClassVar[str] = "open"
    deep: dict[str, Any] = Field(default_factory=dict)
    limit: Annotated[float, Field(allow_inf_nan=True)] = INFINITY
    names: frozenset[str] = frozenset()


class Unreadable(Net):
    """A net whose default its own type refuses."""

    kind: ClassVar[str] = "unreadable"
    limit: float = INFINITY


class Negative(Net):
    """A net whose default is out of bounds."""

    kind: ClassVar[str] = "negative"
    width: Annotated[int, Field(gt=0)] = -1


class Doubling(Net):
    """A net that changes a setting whenever it is read."""

    kind: ClassVar[str] = "doubling"
    width: int = 1

    @field_validator("width")
    @classmethod
    def doubled(cls, width: int) -> int:
        return 2 * width


class OpenCatalog(FakeCatalog):
    faces: ClassVar = {**FakeCatalog.faces, "model": (Open, Unreadable, Negative, Doubling)}


def opened(**settings):
    values = parse(RECIPE, "recipe", []).plain() | {"model": {"kind": "open", **settings}}
    return load(values, (), OpenCatalog())


UNUSUAL = "\x00\x7f\x85\x9f\u2028\u2029\ufeff\ufffe\U0001f600"
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(UNUSUAL), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))


@given(st.dictionaries(texts, values, max_size=3))
@example({"a": [math.nan, -INFINITY], "b": "Infinity", "c": "-.inf", "d": None})
@example({"a\x85b": {"\u2028": "a\x85b", "\u2029": "\x7f\x9f\ufffe\ufeff\U0001f600"}})
@example({"a": "$${env:HOME}", "b": "$$${env:HOME:x}", "c": "1e3", "d": "<<", "<<": "="})
def test_a_setting_is_the_same_in_children_locks_and_prints(deep):
    try:
        recipe = opened(deep=deep)
    except RecipeError:
        # Such as half of a reference to a variable of the environment.
        return
    child = from_values(recipe.values(masked=False), "recipe", {}, OpenCatalog())
    locked = parse(dump(recipe.values()), "recipe.lock.yaml", []).plain()
    printed = parse("\n".join(render(recipe.printable())), "printed.yaml", []).plain()
    for again in (child, from_values(locked, "lock", {}, OpenCatalog()), load(printed, (), OpenCatalog())):
        assert dump(again.values()) == dump(recipe.values())
        assert again.digest == recipe.digest
        assert dump_inline(again.model.deep) == dump_inline(recipe.model.deep)
    assert changes(recipe.values(), child.values()) == []
    assert secret_assignments(recipe) == []


@pytest.mark.parametrize("name", ["limit", "deep"])
def test_infinities_nan_null_and_their_names_are_different_trainings(name):
    numbers = [INFINITY, -INFINITY, math.nan, 0.0]
    if name == "limit":
        recipes = [opened(limit=number) for number in numbers]
    else:
        recipes = [opened(deep={"a": value}) for value in [*numbers, None, "Infinity", "-Infinity", "NaN"]]
    assert len({recipe.digest for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "[.nan, .inf]", "{b: .nan}"])
def test_an_assigned_number_reaches_the_recipe(text, tmp_path):
    path = write_recipe(tmp_path, RECIPE.replace("kind: net", "kind: open"))
    recipe = load(path, [f"model.deep.a={text}"], OpenCatalog())
    value = recipe.values()["model"]["deep"]["a"]
    assert dump_inline(value) == text
    assert is_same(load(path, assignments({"model.deep.a": value}), OpenCatalog()).model.deep["a"], value)


def test_a_set_has_the_same_digest_in_every_order():
    names = [f"name {number}" for number in range(20)]
    recipe = opened(names=names)
    assert recipe.values()["model"]["names"] == sorted(names)
    assert opened(names=names[::-1]).digest == recipe.digest


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "unreadable",
            "model.limit: class Unreadable has a value here that it refuses to read: should be a finite number, "
            "got .inf; declare it as Annotated[float, Field(allow_inf_nan=True)], or choose another default",
        ),
        (
            "negative",
            "model.width: class Negative has a value here that it refuses to read: should be greater than 0, got -1",
        ),
        ("{kind: doubling, width: 3}", "model.width: 6 is read back from a lock as 12"),
    ],
)
def test_a_value_that_would_change_in_the_lock_is_refused(kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = kind if kind.startswith("{") else f"{{kind: {kind}}}"
    path = write_recipe(tmp_path, RECIPE.replace("{kind: net, lr: 1e-3}", model))
    with pytest.raises(RecipeError) as caught:
        load(path, (), OpenCatalog())
    (problem,) = caught.value.problems
    assert f"{problem.path}: {problem.message}" == message
    assert problem.place.line == 3


def test_answers_of_a_server_have_only_numbers_of_json():
    from runner.plugin.configs import ServedResponse

    class Answer(ServedResponse):
        value: float

    text = Answer.model_construct(value=math.nan).model_dump_json()
    assert json.loads(text, parse_constant=pytest.fail) == {"value": None}
