import math

import pytest
import torch

from runner.plugins.grasps.config import CubeGraspsConfig
from runner.plugins.grasps.cube import read
from runner.plugins.grasps.geometry import Hand
from runner.plugins.grasps.shapes import HALF_SIDE, KINDS
from runner.plugins.grasps.transfer import LARGEST, is_strict, is_strict_by, sampled_shape, strict_grasps, transferred
from runner.plugins.grasps.verdicts import verdicts


@pytest.fixture(scope="module")
def cubes():
    return read(CubeGraspsConfig(synthetic=True))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_shape_is_within_the_limits_and_of_its_kind(kind):
    generator = torch.Generator().manual_seed(0)
    for limits in ((0.05, 0.09), (0.07, 0.072)):
        for _ in range(50):
            x, y, z, number = sampled_shape(kind, *limits, generator).tolist()
            widest = limits[1] * (math.hypot(1, HALF_SIDE) if kind == 2 else 1)
            assert limits[0] - 1e-6 <= min(x, y, z)
            assert max(x, y, z) <= widest + 1e-6
            assert number == kind
            if KINDS[kind] == "cuboid":
                assert abs(x - y) >= 0.005 - 1e-6 or limits == (0.07, 0.072)
            elif KINDS[kind] == "capsule":
                assert x == y <= z


def test_a_hand_stays_as_far_from_the_nearer_end_and_turns_only_where_sides_differ():
    grasp = torch.randn(2, 25, generator=torch.Generator().manual_seed(0))
    grasp[:, 2] = torch.tensor([-0.08, 0.09])
    edge = torch.tensor([0.07, 0.08])
    for kind, turns in enumerate((2, 1, 2, 1)):
        moved = transferred(grasp, edge, torch.tensor([0.05, 0.06, 0.1, kind])).view(2, turns, 25)
        # Half of the heights: 0.05 instead of 0.035 and 0.04.
        torch.testing.assert_close(moved[:, :, 2], torch.tensor([[-0.095], [0.1]]).expand(2, turns))
        torch.testing.assert_close(moved[:, 0, [0, 1, *range(3, 25)]], grasp[:, [0, 1, *range(3, 25)]])
        if turns == 2:
            torch.testing.assert_close(moved[:, 1, :2], torch.stack([-grasp[:, 1], grasp[:, 0]], 1))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_boxes_that_are_far_away_need_no_points(cubes, kind):
    """The result is that of all points; here with shapes that some grasps are strict on, and some are not."""
    hand = Hand(cubes.tables)
    shape = torch.tensor([0.08, (0.075, 0.08, 0.08 * math.hypot(1, HALF_SIDE), 0.08)[kind], 0.085, kind])
    grasp = transferred(cubes.grasp[::20], cubes.objects[::20], shape)
    expected = verdicts(hand, grasp, shape.expand(len(grasp), 4))["strict"]
    assert torch.equal(is_strict(hand, grasp, shape), expected)
    assert 0 < int(expected.sum()) < len(grasp)


def test_any_distance_decides_which_grasps_are_strict(cubes):
    """Half-spaces of a cuboid's faces are nearer than the cuboid only outside, at edges and corners."""
    hand = Hand(cubes.tables)
    shape = torch.tensor([0.08, 0.075, 0.085, 0])
    grasp = transferred(cubes.grasp[::20], cubes.objects[::20], shape)

    def from_faces(points):
        return (points.abs() - shape[:3] / 2).amax(-1)

    exact = is_strict(hand, grasp, shape)
    by_faces = is_strict_by(hand, grasp, from_faces)
    assert bool((by_faces | ~exact).all())
    assert int((by_faces ^ exact).sum()) <= 0.1 * len(grasp)
    assert not is_strict_by(hand, grasp, lambda points: from_faces(points) - 0.01).any()


def test_a_shape_with_too_few_strict_grasps_has_none(cubes):
    hand = Hand(cubes.tables)
    found = strict_grasps(hand, cubes.grasp, cubes.objects, torch.tensor([0.08, 0.075, 0.08, 0]))
    assert found.shape == (LARGEST, 25)
    assert strict_grasps(hand, cubes.grasp, cubes.objects, torch.tensor([0.03, 0.02, 0.03, 0])) is None
