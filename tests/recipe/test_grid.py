"""Assignments with several values, and their combinations."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump_inline
from runner.recipe.grid import MOST_RUNS, grid_of, split_values
from runner.recipe.yaml_nodes import parse
from runner.system.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3,3e-3", ["1e-3", "3e-3"]),
        ("1, 2", ["1", "2"]),
        ("[8],[16, 32]", ["[8]", "[16, 32]"]),
        ("[8, 16]", ["[8, 16]"]),
        ("{a: 1, b: [1, 2]},off", ["{a: 1, b: [1, 2]}", "off"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b',c", ["'a,b'", "c"]),
        ("it's,hers", ["it's", "hers"]),
        ('["a,]",b],c', ['["a,]",b]', "c"]),
        ("${env:A:1,2},3", ["${env:A:1,2}", "3"]),
        ("", [""]),
        ("1,", ["1", ""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_separate_values(text, expected):
    assert split_values(text) == expected


@pytest.mark.parametrize("value", ["range(1,3)", "choice(1, 2)", "interval(1e-4,1e-2)", "range(0, 1, 0.1)"])
def test_functions_of_other_tools_are_answered_with_how_several_values_are_written(value):
    with pytest.raises(UsageError, match=r"several values are separated by commas, as in seed=1,2"):
        grid_of([f"seed={value}"])


VALUES = st.recursive(
    st.one_of(
        st.integers(),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text("ab, '\"[]{}", max_size=5),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


def quoted(value):
    """Returns a value as YAML on one line, text in double quotes."""
    if isinstance(value, str):
        return '"' + value.replace('"', "") + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(quoted, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {quoted(item)}" for key, item in value.items()) + "}"
    return dump_inline(value)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_any_values_are_separated(values):
    texts = [quoted(value) for value in values]
    assert split_values(",".join(texts)) == texts
    for text in texts:
        parse(text, "test", [])


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=4))
def test_every_combination_occurs_once_in_order(choices):
    assignments = [f"k{number}={','.join(map(str, values))}" for number, values in enumerate(choices)]
    paths, combinations = grid_of(assignments)
    assert paths == [f"k{number}" for number, values in enumerate(choices) if len(values) > 1]
    expected = [[f"k{number}={value}" for number, value in enumerate(values)] for values in itertools.product(*choices)]
    assert combinations == expected


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["a=1,"], "a=1,: a value is empty; text with commas needs quotes: 'a=\"1,\"'"),
        (["a=1,2", "a=3"], "a: has several values, and is assigned more than once"),
        (["a=" + ",".join("1" * (MOST_RUNS + 1))], "a grid has at most 1,000 runs; use a study for more"),
    ],
)
def test_a_mistake_is_one_line(assignments, message):
    with pytest.raises(UsageError) as caught:
        grid_of(assignments)
    assert str(caught.value) == message
