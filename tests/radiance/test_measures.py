"""Measures of views: what they say of images whose difference is known."""

import pytest
import torch

from runner.plugins.radiance.measures import (
    nearest_class,
    overlap,
    psnr,
    quarter_turned,
    silhouette,
    sliced_wasserstein,
)


def discs(count, side=32, seed=0):
    """White images [N, 3, side, side] with a coloured disc somewhere."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).float()
    centre = side / 4 + side / 2 * torch.rand(count, 2, 1, 1, generator=generator)
    inside = (grid - centre).square().sum(1, keepdim=True) < (side / 5) ** 2
    colour = 2 * torch.rand(count, 3, 1, 1, generator=generator) - 1
    return torch.where(inside, colour, torch.ones(()))


def test_the_distance_of_a_set_to_itself_is_0_and_grows_with_what_is_done_to_it():
    images = discs(24)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    distances = [sliced_wasserstein(images + scale * noise, images) for scale in (0.0, 0.1, 0.5)]
    assert distances[0] == 0
    assert distances == sorted(distances)
    assert sliced_wasserstein(discs(24, seed=5), images) < distances[2]


def test_the_ratio_to_noise_is_known():
    image = torch.zeros(2, 3, 4, 4)
    assert psnr(image + 0.2, image).tolist() == pytest.approx([20.0, 20.0], abs=1e-4)
    assert psnr(image + 5, image).tolist() == pytest.approx([6.0206] * 2, abs=1e-3)  # clamped to white


def test_silhouettes_overlap_by_what_they_share():
    one, other = torch.ones(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
    one[..., :2], other[..., 1:3] = -1, 0.5
    assert silhouette(one).sum() == 8
    assert overlap(one, other).tolist() == pytest.approx([4 / 12])
    assert overlap(torch.ones(1, 3, 4, 4), torch.ones(1, 3, 4, 4)).tolist() == [1.0]


def test_the_view_a_quarter_turn_away_is_of_the_same_class_and_height():
    u = torch.arange(8).repeat(4) / 8
    pose = torch.stack([u, torch.tensor([0.2, 0.5]).repeat_interleave(8).repeat(2)], -1)
    label = torch.arange(2).repeat_interleave(16)
    found = quarter_turned(pose, label)
    turn = torch.remainder(pose[found, 0] - u, 1)
    assert torch.minimum(turn, 1 - turn).tolist() == [0.25] * 32
    assert torch.equal(label[found], label)
    assert torch.equal(pose[found, 1], pose[:, 1])


def test_the_nearest_class_is_that_of_the_image():
    means = torch.stack([torch.full((3, 4, 4), value) for value in (-1.0, 0.0, 1.0)])
    assert nearest_class(means + 0.2, means).tolist() == [0, 1, 2]
