"""Seeds and restored states of the generators give the numbers of torch's own functions."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.system import generators, torch_settings

SEEDS = st.integers(0, 2**32 - 1)


def numbers():
    return random.random(), np.random.random(), torch.rand(3).tolist()


@settings(max_examples=60)
@given(SEEDS)
def test_a_seed_is_that_of_each_library(value):
    generators.seed(value)
    seeded = numbers()
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    assert numbers() == seeded


@pytest.mark.parametrize("available", [False, True])
def test_devices_are_seeded_where_there_are_some(available, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    generators.seed_torch(7)
    assert seeds == [7] * available


@settings(max_examples=60)
@given(SEEDS, st.lists(st.sampled_from(["draw", "precision", "dtype"]), max_size=4))
def test_inside_and_outside_keep_their_numbers_and_settings(value, changes):
    """Whether or not the settings differ, each side has its state again when it is entered."""
    generators.seed(value)
    isolated = generators.Globals()
    inside = numbers()
    generators.seed(value ^ 1)
    before = torch_settings.read()
    with isolated.apart():
        assert numbers() == inside
        following = torch.get_rng_state()
        with isolated.apart():  # is there already
            assert torch.equal(torch.get_rng_state(), following)
            for change in changes:
                apply_change(change)
        state = torch_settings.read(), generators.state_dict()["torch"]
    assert torch_settings.read() == before
    outside = numbers()
    generators.seed(value ^ 1)
    assert numbers() == outside
    with isolated.apart():
        assert torch_settings.read() == state[0]
        assert torch.equal(torch.get_rng_state(), state[1])


def apply_change(change):
    if change == "draw":
        numbers()
    elif change == "precision":
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_default_dtype(torch.float64)
