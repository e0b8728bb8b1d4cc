import math

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from runner.plugins.grasps.config import CubeGraspsConfig
from runner.plugins.grasps.cube import read
from runner.plugins.grasps.geometry import Hand, rotated, yaw
from runner.plugins.grasps.wrenches import contacts, largest_ball, q1, wrenches

FACES = torch.cat([torch.eye(3), -torch.eye(3)]).double()
"""Outward normals of a cube's faces."""


@pytest.fixture(scope="module")
def synthetic():
    return read(CubeGraspsConfig(synthetic=True))


def of_faces(faces, friction=0.5, edges=4):
    """Returns the wrenches of contacts at the centres of faces of a cube with edge 1."""
    normal = -FACES[faces][None]
    size = torch.tensor([math.sqrt(3) / 2]).double()
    return wrenches(-normal / 2, normal, size, friction, edges).reshape(-1, 6).numpy()


@pytest.mark.parametrize(
    ("faces", "friction", "radius"),
    [
        ([0, 3], 0.5, 0.0),  # two opposing contacts cannot resist a torque about their axis
        ([0, 1, 2, 3, 4, 5], 0.0, 0.0),  # forces through the centre have no torque
        ([0, 1, 2], 0.5, 0.0),  # nothing pushes back
        ([0, 1, 2, 3, 4, 5], 0.5, 0.5 / 3),  # a torque about an axis: friction * (1/2) / (sqrt(3)/2) / sqrt(3)
        ([0, 1, 2, 3, 4, 5], 0.9, 0.9 / 3),
    ],
)
def test_contacts_at_the_centres_of_faces(faces, friction, radius):
    assert largest_ball(of_faces(faces, friction)) == pytest.approx(radius, abs=1e-6)


def test_the_ball_of_a_cross_polytope_and_of_one_beside_the_origin():
    points = np.concatenate([np.eye(6), -np.eye(6)])
    assert largest_ball(points) == pytest.approx(1 / math.sqrt(6))
    assert largest_ball(points + np.full(6, 0.1)) == pytest.approx((1 - 0.6) / math.sqrt(6))
    assert largest_ball(points + np.full(6, 2.0)) == 0
    assert largest_ball(points[:6]) == 0


def test_rotated_contacts_have_the_same_ball():
    points = of_faces([0, 1, 2, 3, 4])
    turn = Rotation.random(random_state=0).as_matrix()
    both = np.block([[turn, np.zeros((3, 3))], [np.zeros((3, 3)), turn]])
    assert largest_ball(points) > 0.01
    assert largest_ball(points @ both.T) == pytest.approx(largest_ball(points), rel=1e-9)


def test_contacts_are_on_the_surface_and_push_into_the_cube(synthetic):
    hand, grasp, edge = Hand(synthetic.tables), synthetic.grasp[:64:8], synthetic.objects[:64:8]
    point, normal, is_contact = contacts(hand, grasp, edge)
    half = (edge / 2)[:, None]
    torch.testing.assert_close(point.abs().amax(-1), half.expand(point.shape[:2]))
    torch.testing.assert_close((normal * point).sum(-1), -half.expand(point.shape[:2]))
    distance = hand.distances(grasp, edge)
    assert torch.equal(is_contact, distance.abs() <= 5e-3)
    nearest, again = hand.nearest_points(grasp, edge)
    assert torch.equal(again, distance)
    outside = (distance > 0) & distance.isfinite()
    apart = (nearest - point).norm(dim=-1)
    torch.testing.assert_close(apart[outside], distance[outside], atol=2e-5, rtol=0)


def test_grasps_that_touch_all_sides_hold_and_a_quarter_turn_changes_nothing(synthetic):
    hand, grasp, edge = Hand(synthetic.tables), synthetic.grasp[1024::32], synthetic.objects[1024::32]
    radius = q1(hand, grasp, edge, edges=4)
    assert float(radius.max()) > 0.1
    # A wider cone contains the narrower one.
    assert bool((q1(hand, grasp, edge, friction=1.0, edges=4) >= radius - 1e-6).all())
    turned = q1(hand, rotated(grasp, yaw(torch.tensor(math.pi / 2))), edge, edges=4)
    torch.testing.assert_close(turned, radius, atol=1e-5, rtol=0)
    far = grasp.clone()
    far[:, :3] += 1
    assert q1(hand, far, edge).tolist() == [0.0] * 8
