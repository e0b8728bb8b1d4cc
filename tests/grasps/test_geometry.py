import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from runner.plugins.grasps.config import CubeGraspsConfig
from runner.plugins.grasps.cube import read
from runner.plugins.grasps.geometry import HAND, JOINTS, LIMITS, Hand, matrix, rotated, rotation_6d, yaw

SEEDS = st.integers(0, 2**16)


def rotations(count, seed):
    return torch.from_numpy(Rotation.random(count, random_state=seed).as_matrix()).float()


@pytest.fixture(scope="module")
def made_up():
    return read(CubeGraspsConfig(synthetic=True))


@given(SEEDS)
def test_six_numbers_are_a_rotation(seed):
    turn = rotations(5, seed)
    torch.testing.assert_close(matrix(rotation_6d(turn)), turn, atol=1e-5, rtol=0)
    anything = matrix(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)))
    torch.testing.assert_close(anything @ anything.transpose(1, 2), torch.eye(3).expand(5, 3, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.linalg.det(anything), torch.ones(5), atol=1e-4, rtol=0)


def test_yaw_is_about_z():
    torch.testing.assert_close(yaw(torch.tensor(math.pi / 2)) @ torch.tensor([1.0, 0, 5]), torch.tensor([0.0, 1, 5]))


@given(SEEDS)
def test_a_grasp_that_is_turned_has_its_links_turned(made_up, seed):
    hand, grasp, turn = Hand(made_up.tables), made_up.grasp[:4], rotations(4, seed)
    rotation, position = hand.links(grasp)
    after = hand.links(rotated(grasp, turn))
    torch.testing.assert_close(after[0], turn[:, None] @ rotation, atol=1e-5, rtol=0)
    torch.testing.assert_close(after[1], (turn[:, None] @ position[..., None]).squeeze(-1), atol=1e-6, rtol=0)


def one_box(half=(0.01, 0.02, 0.03)):
    """A hand of a palm and one joint about x, a tenth of a metre away; a box on what it moves."""
    return Hand(
        {
            "parent": torch.tensor([0] * 16), "origin": torch.tensor([[0.0, 0.0, 0.1]] * 16),
            "turn": torch.eye(3).expand(16, 3, 3), "axis": torch.tensor([[1.0, 0.0, 0.0]] * 16),
            "keypoints": torch.tensor([0, 1]), "box_link": torch.tensor([1]), "box_turn": torch.eye(3)[None],
            "box_centre": torch.tensor([[0.0, 0.1, 0.0]]), "box_half": torch.tensor([half]),
            "joint_lower": torch.full((16,), -1.0), "joint_upper": torch.full((16,), 2.0),
        }
    )  # fmt: skip


def pose(x=0.0, y=0.0, z=0.0, angle=0.0):
    grasp = torch.zeros(1, 25)
    grasp[0, :3], grasp[0, 3] = torch.tensor([x, y, z]), angle
    grasp[0, 19:] = torch.tensor([1.0, 0, 0, 0, 1, 0])
    return grasp


def test_a_joint_moves_its_link():
    _, position = one_box().links(pose(1.0, 2.0, 3.0, 0.5))
    torch.testing.assert_close(position[0, 1], torch.tensor([1.0, 2.0, 3.1]))
    rotation, _ = one_box().links(pose(angle=math.pi / 2))
    torch.testing.assert_close(rotation[0, 1] @ torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 0, 1]), atol=1e-6, rtol=0)


def test_joints_beyond_a_limit_are_moved_to_it():
    hand, grasp = one_box(), torch.cat([pose(angle=angle) for angle in (-1.5, 0.5, 2.25)])
    limited = hand.limited(grasp)
    assert limited.grasp[:, 3].tolist() == [-1.0, 0.5, 2.0]
    assert torch.equal(limited.grasp[:, :3], grasp[:, :3])
    assert torch.equal(limited.grasp[:, 4:], grasp[:, 4:])
    assert torch.equal(limited.predicted_joints, grasp[:, 3:19])
    assert hand.excess(limited.predicted_joints).tolist() == [0.5, 0.0, 0.25]
    assert not hand.state_dict().keys() & {"joint_lower", "joint_upper"}


@pytest.mark.parametrize(
    ("x", "y", "z", "millimetres"),
    [(0.0, 0.0, -0.1, 30.0), (0.0, -0.06, -0.1, -30.0), (0.0, -0.1, 0.0, 20.0), (1.0, -0.1, -0.1, 940.0)],
)
def test_distances_to_a_cube_are_those_of_boxes(x, y, z, millimetres):
    """The box of 2 x 4 x 6 cm has its centre at (x, y + 0.1, z + 0.1); the cube has an edge of 10 cm."""
    distance = one_box().distances(pose(x, y, z), torch.tensor([0.1]))
    assert 1e3 * float(distance[0, 1]) == pytest.approx(millimetres, abs=1e-3)
    assert math.isinf(distance[0, 0])  # no box


def test_the_hand_of_the_published_grasps_touches_the_cubes_and_stays_outside(published):
    grasps = read(CubeGraspsConfig(root=str(published("leap_cube_grasps.npz").parent)))
    assert grasps.grasp.shape == (5120, 25)
    rows = torch.arange(0, 5120, 16)
    nearest = 1e3 * Hand(grasps.tables).distances(grasps.grasp[rows], grasps.objects[rows]).amin(1)
    assert -0.5 < float(nearest.quantile(0.05)) < 0 < float(nearest.quantile(0.95)) < 1.5
    assert {*HAND, *LIMITS} == set(grasps.tables)
    assert float(Hand(grasps.tables).excess(grasps.grasp[:, JOINTS]).max()) < 1e-4
