"""The name that was probably meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system.suggestions import nearest, suggestion

NAMES = ("lr", "weight_decay", "betas", "batch_size", "max_grad_norm", "layers", "dropout", "epochs")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("lrate", "lr"), ("learning_rate", "lr"), ("wd", "weight_decay"), ("bs", "batch_size"), ("batch", "batch_size"),
        ("max-grad", "max_grad_norm"), ("n_layers", "layers"), ("Dropout", "dropout"), ("epoch", "epochs"),
    ],
)  # fmt: skip
def test_a_word_of_other_tools_has_the_name_of_ours(word, name):
    assert nearest(word, NAMES) == name


@pytest.mark.parametrize("word", ["x", "zzz", "q_r", ""])
def test_a_word_that_is_like_none_lists_all(word):
    assert nearest(word, NAMES) is None
    assert suggestion(word, NAMES).startswith(" - known: ")


@given(st.sampled_from(NAMES), st.integers(0, 10))
def test_the_beginning_of_a_name_is_enough(name, cut):
    beginning = name[: max(3, len(name) - cut)]
    assert nearest(beginning, NAMES) == name
