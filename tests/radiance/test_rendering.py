"""Volume rendering against what can be calculated."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.radiance.rendering import composite, importance_depths, lengths, stratified_depths

NEAR, FAR = 1.5, 4.5


def drawn(samples, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(5, samples, generator=generator, dtype=dtype)


@given(st.floats(0, 20), st.floats(0, 1), st.integers(2, 40), st.integers(0, 99))
def test_a_constant_medium_has_the_colour_that_can_be_calculated(density, colour, samples, seed):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        depths = stratified_depths(NEAR, FAR, drawn(samples, dtype, seed))
        filled = torch.full_like(depths, density)
        found = composite(filled, torch.full((*depths.shape, 3), colour, dtype=dtype), lengths(depths, NEAR, FAR))
        left = math.exp(-density * (FAR - NEAR))
        expected = torch.full_like(found.colour, colour * (1 - left) + left)
        torch.testing.assert_close(found.colour, expected, atol=tolerance, rtol=0)


@given(st.integers(0, 999), st.floats(0, 50))
def test_weights_and_the_background_add_up_to_1(seed, density):
    depths = stratified_depths(NEAR, FAR, drawn(24, seed=seed))
    found = composite(density * drawn(24, seed=seed + 1), torch.zeros(5, 24, 3), lengths(depths, NEAR, FAR))
    torch.testing.assert_close(found.weights.sum(-1), found.opacity, atol=1e-12, rtol=0)
    # All that is black hides the white background by as much.
    torch.testing.assert_close(found.colour, (1 - found.opacity)[:, None].expand(-1, 3), atol=1e-12, rtol=0)


def test_depths_lie_in_their_intervals_and_lengths_fill_the_ray():
    depths = stratified_depths(NEAR, FAR, drawn(24))
    number = ((depths - NEAR) / (FAR - NEAR) * 24).floor()
    assert torch.equal(number, torch.arange(24.0, dtype=torch.float64).expand(5, -1))
    torch.testing.assert_close(lengths(depths, NEAR, FAR).sum(-1), torch.full((5,), FAR - NEAR, dtype=torch.float64))


def test_what_is_in_front_hides_what_is_behind():
    colour = torch.eye(3).repeat(1, 1, 1)[:, :2]
    found = composite(torch.tensor([[1e4, 1e4]]), colour, torch.ones(1, 2))
    torch.testing.assert_close(found.colour, torch.tensor([[1.0, 0.0, 0.0]]))


def test_more_samples_lie_where_something_is():
    depths = stratified_depths(NEAR, FAR, torch.full((1, 24), 0.5))
    weights = torch.zeros(1, 24)
    weights[0, 12] = 1.0
    uniform = (torch.arange(64) + 0.5)[None] / 64
    every = importance_depths(weights, depths, NEAR, FAR, uniform)
    assert every.shape == (1, 88)
    assert torch.equal(every, every.sort(-1).values)
    inside = ((every - depths[0, 12]).abs() < (FAR - NEAR) / 24).float().sum()
    assert inside > 55


@given(st.integers(0, 99))
def test_samples_of_equal_weights_are_spread_evenly(seed):
    depths = stratified_depths(NEAR, FAR, drawn(24, torch.float32, seed))
    uniform = ((torch.arange(240) + 0.5) / 240).expand(5, -1)
    weights = lengths(depths, NEAR, FAR) - 1e-3  # proportional to the lengths, with what is added to each
    every = importance_depths(weights, depths, NEAR, FAR, uniform)
    assert float(every.mean()) == pytest.approx((NEAR + FAR) / 2, abs=0.05)


def test_16_bits_are_not_used_in_the_sum():
    depths = stratified_depths(NEAR, FAR, drawn(24, torch.float32))
    density, colour, length = 9 * drawn(24, torch.float32, 1), torch.rand(5, 24, 3), lengths(depths, NEAR, FAR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = composite(density, colour, length)
    assert torch.equal(inside.colour, composite(density, colour, length).colour)
