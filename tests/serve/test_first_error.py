"""Validation that stops at the first errors, on models and values that a generator makes."""

from contextlib import suppress
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from runner.serve.first_error import first_error_validator

MANY = 3000
FIELDS = ("alpha", "beta", "gamma")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
LENIENT = ConfigDict(extra="ignore")
SCALARS = st.sampled_from([int, float, str, bool])


def containers(inner):
    """Types that hold another one, some of a limited length."""
    length = st.integers(0, 4) | st.none()
    return st.one_of(
        st.builds(lambda item, longest: Annotated[list[item], Field(max_length=longest)], inner, length),
        st.builds(lambda item, longest: Annotated[dict[str, item], Field(max_length=longest)], inner, length),
        st.builds(lambda item: item | None, inner),
        st.builds(lambda left, right: left | right, inner, inner),
        models(inner),
    )


def models(inner):
    return st.builds(
        lambda types, config: create_model(
            "Generated", __config__=config, **dict(zip(FIELDS, ((each, ...) for each in types), strict=False))
        ),
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from([STRICT, LENIENT]),
    )


TYPES = st.recursive(SCALARS, containers, max_leaves=5)
MODELS = models(TYPES)
NAMES = st.sampled_from([*FIELDS, "other"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=True) | st.sampled_from(["", "a", "3"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def result(validate, value):
    """The validated value; None if it is refused."""
    try:
        return repr(validate(value))
    except ValidationError:
        return None


@settings(max_examples=100, deadline=None)
@given(MODELS, st.dictionaries(NAMES, VALUES, max_size=4))
def test_it_accepts_what_the_model_accepts(model, value):
    expected = result(TypeAdapter(model).validate_python, value)
    assert result(first_error_validator(model).validate_python, value) == expected


WRONG = [[[]] * MANY, {str(number): [] for number in range(MANY)}, [{"other": 1}] * MANY, [{"alpha": [[]] * MANY}] * 3]


def number_of_fields(annotation):
    """How many fields and alternatives there are: each of them may have errors of its own."""
    return repr(TypeAdapter(annotation).core_schema).count("'type'")


@settings(max_examples=60, deadline=None)
@given(MODELS, st.sampled_from(WRONG))
def test_the_number_of_errors_does_not_depend_on_the_number_of_wrong_items(model, wrong):
    value = dict.fromkeys(model.model_fields, wrong)
    for surplus in ({}, {str(number): 0 for number in range(MANY)}):
        count = 0
        # A model may be drawn to which these values are right.
        with suppress(ValidationError):
            try:
                first_error_validator(model).validate_python(value | surplus)
            except ValidationError as error:
                count = error.error_count()
                raise
        assert count <= number_of_fields(model)


class Part(BaseModel):
    """A model that plugin authors write without thinking of hostile clients."""

    model_config = ConfigDict(extra="forbid")
    values: list[int]
    part: "Part | None" = None


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: Annotated[list[Part], Field(max_length=3)]
    table: dict[str, int] = {}
    pairs: list[tuple[int, float]] = []
    text: str = Field("", alias="Text")


def refusal(value):
    with pytest.raises(ValidationError) as caught:
        first_error_validator(Request).validate_python(value)
    return [(error["loc"], error["type"]) for error in caught.value.errors()]


@pytest.mark.parametrize(
    ("value", "errors"),
    [
        ({"parts": ["wrong"] * 4}, [(("parts",), "too_long")]),
        ({"parts": ["wrong"] * 3}, [(("parts", 0), "model_type")]),
        ({"parts": [{"values": ["wrong"] * MANY}] * 3}, [(("parts", 0, "values", 0), "int_parsing")]),
        ({"parts": [], "table": dict.fromkeys("abc", "")}, [(("table", "a"), "int_parsing")]),
        ({"parts": [], "pairs": [["", ""]] * MANY}, [(("pairs", 0, 0), "int_parsing")]),
        ({"parts": [], **{f"x{number}": 0 for number in range(MANY)}}, [(("x0",), "extra_forbidden")]),
        (
            {"parts": [{"values": [], "part": {"values": [], **{f"x{number}": 0 for number in range(MANY)}}}]},
            [(("parts", 0, "part", "x0"), "extra_forbidden")],
        ),
    ],
)
def test_the_first_error_has_its_place(value, errors):
    assert refusal(value) == errors


def test_aliases_are_names():
    request = first_error_validator(Request).validate_python({"parts": [{"values": [1]}], "Text": "a"})
    assert isinstance(request, Request)
    assert request.text == "a"
