"""Examples of requests: built from any schema, accepted by the model, and sent by the printed command."""

import json
import shlex
from typing import Annotated, Literal

import pytest
from hypothesis import example as example_with
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, create_model

from runner.plugin.configs import ServedRequest
from runner.serve.example import curl_command, example_of

KINDS = [
    int, float, str, bool, list[int], list[list[float]], int | None, Literal["a", "b"],
    Annotated[int, Field(ge=3, le=9)], Annotated[int, Field(gt=3)], Annotated[float, Field(ge=-2, le=-1)],
    Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(le=-5)], Annotated[str, Field(min_length=12)],
    Annotated[str, Field(max_length=3)], Annotated[list[str], Field(min_length=2, max_length=2)],
    Annotated[list[Annotated[list[float], Field(min_length=3, max_length=3)]], Field(min_length=1)],
]  # fmt: skip
TYPES = st.sampled_from(KINDS)
NAMES = st.text("abcdefgh", min_size=1, max_size=6)


class Learner:
    """Accepts everything, or nothing."""

    def __init__(self, example=None, refusal=None):
        self.example, self.refusal = example, refusal

    def example_request(self):
        return self.example

    def refused(self, request):
        return self.refusal


@example_with({f"field{number}": kind for number, kind in enumerate(KINDS)}, {"seed": 1})
@given(st.dictionaries(NAMES, TYPES, max_size=5), st.dictionaries(NAMES, st.integers(), max_size=2))
def test_every_schema_has_an_example_that_it_accepts(required, optional):
    fields = {f"{name}_": (kind, ...) for name, kind in required.items()}
    fields |= {f"{name}_given": (int, default) for name, default in optional.items()}
    request = create_model("Request", __base__=ServedRequest, **fields)
    example = example_of(Learner(), request)
    assert example is not None
    request.model_validate_json(json.dumps(example))
    words = shlex.split(curl_command("http://127.0.0.1:80", example))
    assert words[0] == "curl"
    if "-" not in words[-1]:
        assert json.loads(words[-1]) == example


def test_the_example_of_the_learner_goes_first_and_a_refused_one_is_none():
    request = create_model("Request", __base__=ServedRequest, number=(int, ...))
    assert example_of(Learner({"number": 7}), request) == {"number": 7}
    assert example_of(Learner({"number": "many"}), request) is None
    assert example_of(Learner(refusal="number: too small"), request) is None


@pytest.mark.parametrize(("count", "ending"), [(3, "}'"), (3000, "/example")])
def test_a_long_request_is_fetched_from_the_server(count, ending):
    command = curl_command("http://h:1", {"image": [0.5] * count})
    assert (" | curl " in command) is (count > 1000)
    assert ending in command
    assert len(command) < 800


def test_without_an_example_the_command_prints_the_api():
    assert curl_command("http://h:1", None) == "curl -s http://h:1/openapi.json"
