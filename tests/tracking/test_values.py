import re

from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param

from runner.tracking.store import key, params_of, text
from runner.tracking.workspace import folder_name


def test_settings_become_dotted_params_spelled_as_json():
    settings = {
        "model": {"kind": "masac", "hidden": [64, 64], "lr": 1e-3, "extra": {}},
        "seed": 42,
        "stage": None,
        "on": True,
    }
    assert params_of(settings) == {
        "model.kind": "masac",
        "model.hidden": "[64, 64]",
        "model.lr": "0.001",
        "model.extra": "{}",
        "seed": "42",
        "stage": "null",
        "on": "true",
    }


def test_a_long_value_says_that_it_was_shortened():
    shortened = text("x" * 10_000)
    assert len(shortened) == 6000
    assert shortened.endswith(" ... [shortened from 10000 characters]")
    assert text("x" * 6000) == "x" * 6000


@given(st.text(min_size=1), st.text())
def test_mlflow_accepts_every_key_and_value(name, value):
    _validate_metric_name(key(name))
    _validate_param(key(name), text(value))


@given(st.from_regex(r"[a-z]+(/[a-z_]+)*", fullmatch=True).filter(lambda name: len(name) <= 250))
def test_ordinary_names_stay_as_they_are(name):
    assert key(name) == name


@given(st.text())
def test_folder_names_stay_in_their_folder(name):
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", folder_name(name))
