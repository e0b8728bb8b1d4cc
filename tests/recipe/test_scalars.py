import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.recipe.dumping import dump, dump_inline
from runner.recipe.scalars import resolve
from runner.recipe.yaml_nodes import parse

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("60_000", 60_000),
        ("1_000.5", 1000.5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("007", 7),
        ("0o17", 15),
        ("0xff", 255),
        ("+12", 12),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("~", None),
        ("", None),
        ("True", True),
        ("false", False),
    ],
)
def test_numbers_and_constants_of_yaml_1_2(text, value):
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "off",
        "yes",
        "no",
        "y",
        "_1",
        "1_",
        "1__0",
        "0o8",
        "1e999",
        "2024-01-01",
        "12:30:00",
        "tRUE",
        "9" * 5000,
        "²",
    ],
)
def test_everything_else_is_text(text):
    assert resolve(text) == text


def test_not_a_number():
    assert math.isnan(resolve(".nan"))


@given(values)
def test_what_is_written_reads_back(value):
    assert parse(dump({"a": value}), "text", []).plain() == {"a": value}
    assert parse(f"a: {dump_inline(value)}", "text", []).plain() == {"a": value}


def test_words_that_look_like_numbers_are_quoted_and_switches_are_not():
    assert dump({"a": "1e-3", "b": "on", "c": True}) == "a: '1e-3'\nb: on\nc: true\n"
