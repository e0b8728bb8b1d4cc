"""Cameras look where they should, and rays meet what they show."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.plugins.radiance.camera import (
    angles_of,
    camera_from_angles,
    camera_from_direction,
    pixel_positions,
    project,
    rays,
    to_opengl,
)

LENS = torch.tensor([1 / math.tan(math.radians(10))] * 2 + [0.0, 0.0], dtype=torch.float64)
UNIT = st.floats(0.0, 0.999)


def cameras(*angles, radius=2.5):
    return camera_from_angles(torch.tensor(angles, dtype=torch.float64), radius)


@given(UNIT, st.floats(0.0, 1.0), st.floats(0.5, 10))
def test_a_camera_on_the_sphere_sees_the_origin_in_the_middle_and_the_world_upright(u, v, radius):
    camera = cameras((u, v), radius=radius)
    axes = camera[0, :, :3]
    torch.testing.assert_close(axes.T @ axes, torch.eye(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert float(torch.linalg.det(axes)) == pytest.approx(1)
    assert float(camera[0, :, 3].norm()) == pytest.approx(radius)
    centre = project(torch.zeros(1, 1, 3, dtype=torch.float64), camera, LENS)
    torch.testing.assert_close(centre, torch.zeros_like(centre), atol=1e-12, rtol=0)
    assert axes[2, 1] >= -1e-12


@given(UNIT, st.floats(0.01, 0.99))
def test_angles_are_found_again(u, v):
    found = angles_of(cameras((u, v)))[0]
    assert math.cos(2 * math.pi * float(found[0] - u)) == pytest.approx(1, abs=1e-12)
    assert float(found[1]) == pytest.approx(v, abs=1e-12)


def test_positions_on_the_sphere_follow_the_formula():
    u, v = 0.2, 0.3
    theta, phi = 2 * math.pi * u, math.acos(1 - 2 * v)
    expected = [2.5 * math.sin(phi) * math.cos(theta), 2.5 * math.sin(phi) * math.sin(theta), 2.5 * math.cos(phi)]
    assert cameras((u, v))[0, :, 3].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("corner", [(-1, -1), (1, -1), (-1, 1), (1, 1)])
def test_rays_at_the_corners_follow_the_formula(corner):
    camera = cameras((0.1, 0.4))
    origin, direction = rays(camera, torch.tensor([[corner]], dtype=torch.float64), LENS)
    right, up, back = camera[0, :, :3].unbind(-1)
    slope = math.tan(math.radians(10))
    expected = -back + slope * corner[0] * right - slope * corner[1] * up
    torch.testing.assert_close(direction[0, 0], expected / expected.norm(), atol=1e-12, rtol=0)
    torch.testing.assert_close(origin[0, 0], camera[0, :, 3])


@given(UNIT, st.floats(0.05, 0.95), st.floats(-1, 1), st.floats(-1, 1), st.floats(1.0, 5.0), st.floats(-0.5, 0.5))
def test_a_point_on_a_ray_appears_where_the_ray_begins_in_the_image(u, v, x, y, depth, axis):
    lens = LENS + torch.tensor([0.0, 0.3, axis, -axis], dtype=torch.float64)
    camera, position = cameras((u, v)), torch.tensor([[[x, y]]], dtype=torch.float64)
    origin, direction = rays(camera, position, lens)
    torch.testing.assert_close(project(origin + depth * direction, camera, lens), position, atol=1e-9, rtol=0)


def test_conventions_describe_one_camera():
    opengl = cameras((0.3, 0.35))
    opencv = opengl.clone()
    opencv[..., 1:3] *= -1
    torch.testing.assert_close(to_opengl(opencv, "opencv"), opengl)
    torch.testing.assert_close(to_opengl(opengl, "opengl"), opengl)
    position = opengl[..., 3]
    torch.testing.assert_close(camera_from_direction(position, -3 * position), opengl)


def test_a_camera_that_looks_straight_down_has_axes():
    camera = camera_from_direction(torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[0.0, 0.0, -1.0]]))
    torch.testing.assert_close(camera[0, :, :3].T @ camera[0, :, :3], torch.eye(3))


def test_pixels_lie_at_their_centres_row_by_row():
    assert pixel_positions(2, 4)[:5].tolist() == [
        [-0.75, -0.5],
        [-0.25, -0.5],
        [0.25, -0.5],
        [0.75, -0.5],
        [-0.75, 0.5],
    ]
    assert pixel_positions(2, 2, offset=0.0)[0].tolist() == [-1.0, -1.0]
