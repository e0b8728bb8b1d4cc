"""Patches lie inside of images, and real and rendered ones at the same places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.radiance.camera import pixel_positions
from runner.plugins.radiance.patches import annealed_scale, beta_scale, colours_at, patch_at, rows_to_patch

SCALES = [annealed_scale, beta_scale]


@given(st.sampled_from(SCALES), st.floats(0, 1), st.floats(0.1, 1), st.integers(0, 99))
def test_patches_lie_inside_of_the_image(scales, fraction, least, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = scales(torch.rand(20, generator=generator), least, fraction)
    assert ((scale >= least - 1e-6) & (scale <= 1 + 1e-6)).all()
    positions = patch_at(scale, torch.rand(20, 2, generator=generator)).positions(8)
    assert positions.abs().max() <= 1


@pytest.mark.parametrize("scales", SCALES)
def test_patches_begin_with_the_whole_image_and_become_smaller(scales):
    uniform = torch.linspace(0.01, 0.99, 99)
    first, last = scales(uniform, 0.25, 0.0), scales(uniform, 0.25, 1.0)
    assert first.min() > 0.98
    assert last.min() < 0.3
    assert 0.4 < last.mean() < 0.75


def test_a_patch_of_the_whole_image_has_its_pixels():
    image = torch.rand(2, 3, 16, 16)
    patch = patch_at(torch.ones(2), torch.rand(2, 2))
    torch.testing.assert_close(colours_at(image, patch.positions(16), 16), image, atol=1e-5, rtol=0)


def test_rows_of_rays_become_the_image_whose_positions_they_have():
    image = torch.rand(2, 3, 8, 8)
    positions = pixel_positions(8, 8).expand(2, -1, -1)
    rows = colours_at(image, positions, 8).flatten(2).transpose(1, 2)
    torch.testing.assert_close(rows_to_patch(rows, 8), image, atol=1e-5, rtol=0)


def test_half_a_patch_at_the_right_bottom_is_that_part():
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(1, 3, 8, 8)
    patch = patch_at(torch.tensor([0.5]), torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(colours_at(image, patch.positions(4), 4), image[..., 4:, 4:])
