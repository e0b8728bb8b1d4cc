"""From the body of a request to a request."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.serve.reading import MalformedError, parse_json

NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans())
def test_valid_json_is_read(value, ascii_only):
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, VALUES), min_size=1, max_size=5), st.data())
def test_a_key_that_appears_twice_is_refused_wherever_it_is(members, data):
    repeated = data.draw(st.sampled_from(members))
    members.insert(data.draw(st.integers(0, len(members))), (repeated[0], data.draw(VALUES)))
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members) + "}"
    for _ in range(data.draw(st.integers(0, 3))):
        text = data.draw(st.sampled_from(['{"outer": %s}', "[0, %s]"])) % text
    with pytest.raises(MalformedError, match="appears twice in an object"):
        parse_json(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text('[]{}",:0123456789.eE+-nulltrefasNI \\u', max_size=40).map(str.encode))
def test_anything_else_is_refused_in_one_line(body):
    line = ""
    try:
        parse_json(body)
    except MalformedError as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 200
    if not line:
        json.loads(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: field required"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"a":' * 100_000, "the body is nested too deeply"),
        (b"\xff", "the body is not JSON: byte 0 is not UTF-8"),
        (b'{"x": NaN}', "the body is not JSON: NaN"),
        (b"-Infinity", "the body is not JSON: -Infinity"),
        (b"9" * 5000, "the body is not JSON: Exceeds the limit"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' appears twice in an object"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(body, message):
    with pytest.raises(MalformedError) as caught:
        parse_json(body)
    assert str(caught.value).startswith(message)
