"""JSON for other programs has only what JSON has."""

import json
import math
from typing import NamedTuple

import pytest

from runner.cli.common import print_json
from runner.system.stored_json import json_text


class Pair(NamedTuple):
    first: float
    second: object


def parsed(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("number", "expected"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
@pytest.mark.parametrize(
    "form",
    [
        lambda value: value,
        lambda value: {"loss": value},
        lambda value: [1, [value]],
        lambda value: (value,),
        lambda value: {"cases": [{"rows": ({"ratio": value},)}]},
        lambda value: Pair(value, None),
    ],
)
def test_a_number_that_json_does_not_have_is_text_wherever_it_is(form, number, expected):
    assert parsed(json_text(form(number))) == parsed(json.dumps(form(expected)))


def test_other_values_are_as_json_has_them():
    values = {"a": 1.5, "b": None, "c": [True, 2, "NaN"], "d": {}}
    assert json_text(values, indent=1) == json.dumps(values, indent=1)
    assert json_text({"a": {1}}, default=sorted) == '{"a": [1]}'


def test_what_commands_print_is_json(capsys):
    print_json({"metrics": {"nn": math.nan}, "intervals": [(0.0, math.inf)]})
    printed = parsed(capsys.readouterr().out)
    assert (printed["metrics"], printed["intervals"]) == ({"nn": "NaN"}, [[0.0, "Infinity"]])
