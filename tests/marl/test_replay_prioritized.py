"""Priorities, probabilities and weights as Schaul et al. 2016 define them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.marl.replay.prioritized import PrioritizedReplay

CPU = torch.device("cpu")
SHAPES = {"observation": (1,)}
ERRORS = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=150)


def make(capacity, filled=None, alpha=0.6, beta=(0.4, 1.0), epsilon=1e-5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    replay = PrioritizedReplay(capacity, SHAPES, CPU, generator, alpha=alpha, beta=beta, epsilon=epsilon)
    add(replay, capacity if filled is None else filled)
    return replay


def add(replay, count):
    replay.add({"observation": torch.zeros(count, 1)})


def with_errors(errors, **settings):
    replay = make(len(errors), **settings)
    replay.update_priorities(torch.arange(len(errors)), torch.tensor(errors))
    return replay


def priorities(replay):
    """p^alpha of every stored transition."""
    return replay.state_dict()["priorities"].double() * 2.0**-24


@given(errors=ERRORS, alpha=st.floats(0, 1), epsilon=st.floats(1e-6, 1))
def test_priority_is_a_power_of_the_error(errors, alpha, epsilon):
    expected = (torch.tensor(errors).double().abs() + epsilon) ** alpha
    stored = priorities(with_errors(errors, alpha=alpha, epsilon=epsilon))
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=2.0**-24)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_transitions_are_drawn_in_proportion_to_their_priorities(alpha):
    errors = torch.rand(300, generator=torch.Generator().manual_seed(1)).mul(10).tolist()
    replay = with_errors(errors, alpha=alpha)
    draws = 200
    counts = sum(torch.bincount(replay.sample(256, 0.0)["index"], minlength=300) for _ in range(draws))
    expected = priorities(replay) / priorities(replay).sum() * 256 * draws
    # Chi-square with 299 degrees of freedom: its 99.9 % point is 378. Strata only make it smaller.
    assert ((counts - expected).square() / expected).sum() < 378


@given(errors=ERRORS, seed=st.integers(0, 2**32))
def test_every_stratum_gives_one_transition(errors, seed):
    replay = with_errors(errors, seed=seed)
    counts = torch.bincount(replay.sample(64, 0.0)["index"], minlength=len(errors))
    expected = priorities(replay) / priorities(replay).sum() * 64
    assert ((counts - expected).abs() < 2).all()  # a share of whole strata, and parts of at most two


@given(errors=ERRORS, progress=st.floats(0, 1), filled=st.integers(1, 150))
def test_weights_correct_for_the_probabilities(errors, progress, filled):
    replay = make(150, filled)
    index = torch.arange(len(errors)) % filled
    replay.update_priorities(index, torch.tensor(errors))
    batch = replay.sample(32, progress)
    probability = (priorities(replay) / priorities(replay).sum())[batch["index"]]
    weight = (filled * probability) ** -(0.4 + 0.6 * progress)
    assert batch["weight"].dtype == torch.float32
    torch.testing.assert_close(batch["weight"].double(), weight / weight.max(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(("progress", "beta"), [(-1.0, 0.2), (0.0, 0.2), (0.25, 0.35), (1.0, 0.8), (2.0, 0.8)])
def test_beta_goes_from_its_first_to_its_second_value(progress, beta):
    replay = with_errors([1.0, 4.0], alpha=1.0, beta=(0.2, 0.8), epsilon=1e-6)
    batch = replay.sample(64, progress)
    assert batch["weight"].amin().item() == pytest.approx(4**-beta, rel=1e-4)


@given(capacity=st.integers(1, 300), filled=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_an_empty_slot_is_never_drawn(capacity, filled, seed):
    replay = make(capacity, min(filled, capacity), seed=seed)
    replay.update_priorities(torch.arange(len(replay)), torch.zeros(len(replay)))
    assert replay.sample(512, 0.0)["index"].max() < len(replay)


def test_new_transitions_get_the_largest_priority_ever_seen():
    replay = make(10, 3)
    assert priorities(replay).tolist() == [1.0] * 3
    replay.update_priorities(torch.tensor([1]), torch.tensor([-32.0]))
    replay.update_priorities(torch.tensor([1]), torch.tensor([0.5]))
    add(replay, 2)
    assert priorities(replay)[3:].tolist() == pytest.approx([32**0.6] * 2, rel=1e-5)


def test_a_transition_drawn_twice_gets_the_larger_priority():
    replay = make(5)
    replay.update_priorities(torch.tensor([2, 4, 2, 2]), torch.tensor([0.1, 7.0, -3.0, 2.0]))
    assert priorities(replay).tolist() == pytest.approx([1, 1, 3**0.6, 1, 7**0.6], rel=1e-4)


def test_numbers_that_are_none_and_far_too_large_ones_leave_the_buffer_usable():
    replay = make(4)
    replay.update_priorities(torch.arange(3), torch.tensor([float("nan"), float("inf"), 1e30]))
    assert (priorities(replay) > 0).all()
    assert priorities(replay)[0] == 2.0**-24
    batch = replay.sample(100, 0.5)
    assert set(batch["index"].tolist()) == {1, 2}
    assert batch["weight"].isfinite().all()


def test_errors_may_come_in_double_precision():
    replay = make(4)
    replay.update_priorities(torch.arange(4), torch.full((4,), 2.0, dtype=torch.float64))
    assert priorities(replay).tolist() == pytest.approx([2**0.6] * 4, rel=1e-4)


def test_the_errors_themselves_are_left_alone():
    replay, errors = make(4), torch.tensor([-1.0, 2.0, -3.0, 4.0])
    replay.update_priorities(torch.arange(4), errors)
    assert errors.tolist() == [-1.0, 2.0, -3.0, 4.0]


def test_priorities_never_drift():
    replay = make(1000)
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        index = replay.sample(64, 0.0)["index"]
        replay.update_priorities(index, torch.rand(64, generator=generator) * 1e4)
    add(replay, 37)
    assert replay._priorities._sums.sum() == replay._priorities.masses.sum()
