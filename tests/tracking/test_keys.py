import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from runner.tracking.keys import MAX_LENGTH, interval_keys, mlflow_key, setting_keys
from runner.tracking.store import params_of

COLLIDING_NAMES = [
    ["error<5", "error>5", "error_5", "error=5", "error_less-than_5"],
    ["top@1", "top#1", "top%1", "top$1", "top_1"],
    ["loss/train", "loss//train", "./loss/train", "loss/./train", "/loss/train", "loss/train/", "loss/../loss/train"],
    ["m" * MAX_LENGTH, "m" * MAX_LENGTH + "1", "m" * MAX_LENGTH + "2", "m" * 400],
    ["..", ".", "...", "", "/", "//"],
    ["tab\tstop", "tab\nstop", "tab\0stop", "tab stop"],
    ["caf\u00e9", "cafe\u0301", "caf\udce9", "cafe"],
    ["(a)", "[a]", "{a}", "'a'", '"a"', "a"],
]


@pytest.mark.parametrize("names", COLLIDING_NAMES)
def test_names_that_differ_have_keys_that_differ(names):
    keys = [mlflow_key(f"eval/{name}") for name in names]
    assert len(set(keys)) == len(names)
    for key in keys:
        _validate_metric_name(key)
        assert len(key) <= MAX_LENGTH


# Of short names of these characters, most would share a key without its digest.
metric_names = st.text("_/.", max_size=4) | st.text(st.characters(codec=None), max_size=8)


@given(st.lists(metric_names, min_size=2, max_size=40, unique=True))
def test_no_two_names_share_a_key(names):
    assert len({mlflow_key(name) for name in names}) == len(names)


@given(st.text(st.characters(codec=None), min_size=1, max_size=300))
def test_a_key_is_its_own_key(name):
    assert mlflow_key(mlflow_key(name)) == mlflow_key(name)


def test_refused_characters_become_readable_words():
    assert mlflow_key("eval/err<5").startswith("eval/err_less-than_5-")
    assert mlflow_key("eval/err>5").startswith("eval/err_greater-than_5-")
    assert mlflow_key("hits@1").startswith("hits_commercial-at_1-")


@pytest.mark.parametrize("name", ["eval/accuracy", "précision", "精度", "with space", "colon:1", "class.0", "F1", "f1"])
def test_a_name_that_mlflow_accepts_is_its_own_key(name):
    assert mlflow_key(name) == name


def test_settings_whose_names_contain_dots_keep_values_of_their_own():
    settings = {"groups": {"encoder.layer": 1, "encoder": {"layer": 2}}, "labels": {"<5": "few", ">5": "many"}}
    assert sorted(params_of(settings).values()) == ["1", "2", "few", "many"]


odd_names = st.text("ab.</", max_size=3)
sections = st.recursive(st.integers(), lambda inner: st.dictionaries(odd_names, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from(["model", "data", "train"]), sections))
def test_no_two_settings_share_a_key(settings):
    """The sections of a recipe have names of the runner; names in them may be anybody's."""
    keys = [key for key, _ in setting_keys(settings)]
    assert len(set(keys)) == len(keys)


def test_paths_of_overrides_stay_as_they_are():
    assert dict(setting_keys({"optimizer.lr": 0.1, "model.hidden": [64]})) == {
        "optimizer.lr": 0.1,
        "model.hidden": [64],
    }


def test_bounds_of_an_interval_share_no_key_with_a_metric():
    metrics = ["eval/score", "eval/score_low", "eval/score_high", "eval/low/score"]
    bounds = [key for metric in metrics for key in interval_keys(metric)]
    assert len({*metrics, *bounds}) == 3 * len(metrics)
