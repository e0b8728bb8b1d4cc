"""Clouds of objects on a table, selected by masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from running import tiny, train_here
from scipy.spatial import ConvexHull

from runner.plugins.grasps.config import TableConfig
from runner.plugins.grasps.object_mask import select_by_mask
from runner.plugins.grasps.shapes import heights, on_surface, signed_distance, surface_areas
from runner.plugins.grasps.tables import on_table
from runner.system.errors import UsageError

SHAPES = torch.tensor(
    [[0.08, 0.06, 0.05, 0], [0.06, 0.06, 0.08, 1], [0.07, 0.07 / math.cos(math.pi / 6), 0.06, 2], [0.06, 0.06, 0.09, 3]]
)
OBJECTS = {"cubes": torch.tensor([0.05, 0.08, 0.09]), "shapes": SHAPES}


@pytest.mark.parametrize("name", OBJECTS)
def test_areas_are_those_of_the_surfaces(name):
    objects = OBJECTS[name]
    clouds = on_surface(objects, 20_000)
    measured = [ConvexHull(cloud.double().numpy()).area for cloud in clouds]
    assert surface_areas(objects).tolist() == pytest.approx(measured, rel=0.02)


@given(st.data(), st.floats(0, 1), st.integers(1, 40))
def test_a_mask_selects_its_share(data, share, points):
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=5)))
    wanted = round(points * share)
    on_object = mask.sum(1)
    is_possible = (not wanted or on_object.all()) and (wanted == points or (on_object < 12).all())
    if not is_possible:
        with pytest.raises(UsageError, match=r"the mask of scene \d has none of its 12 points on"):
            select_by_mask(mask, points, share)
        return
    selected = select_by_mask(mask, points, share)
    assert selected.shape == (len(mask), points)
    assert torch.equal(mask.gather(1, selected).sum(1), torch.full((len(mask),), wanted))
    for row, count in zip(selected, on_object.tolist(), strict=True):
        # None is repeated before all were selected.
        assert len(set(row[:wanted].tolist())) == min(wanted, count)
        assert len(set(row[wanted:].tolist())) == min(points - wanted, 12 - count)


@pytest.mark.parametrize("share", [0.25, 0.6, None])
@pytest.mark.parametrize("name", OBJECTS)
def test_clouds_show_the_object_and_the_table_beside_it(name, share):
    objects = OBJECTS[name].repeat_interleave(50, 0)
    torch.manual_seed(0)
    cloud = on_table(objects, TableConfig(object_share=share), 200)
    bottom = -heights(objects)[:, None] / 2
    in_plan = torch.cat([cloud[..., :2], torch.zeros_like(cloud[..., :1])], 2)
    is_beside = (cloud[..., 2] - bottom).abs() < 1e-6
    is_beside &= signed_distance(in_plan, objects) >= 0
    is_on_object = signed_distance(cloud, objects).abs() < 1e-6
    assert (is_beside | is_on_object).all()
    assert cloud[..., :2].norm(dim=-1).max() <= 0.15
    # Points of the edges at the bottom count as both.
    counts = (is_on_object & ~is_beside).sum(1).double()
    if share is not None:
        assert (counts - 200 * share).abs().max() <= 1
        return
    areas = surface_areas(objects)
    covered = math.pi * 0.15**2 - areas.new_tensor(footprints(objects))
    expected = areas / (areas + covered) * 200
    assert counts.mean().item() == pytest.approx(expected.mean().item(), rel=0.03)


def footprints(objects):
    """The areas that objects cover in the plane through their middle."""
    plan = on_surface(objects, 4000)[..., :2].double().numpy()
    return [ConvexHull(points).volume for points in plan]


@pytest.mark.parametrize(
    ("settings", "part"),
    [({"radius_mm": 20}, "anything else"), ({"radius_mm": 2000, "scene_points": 64}, "the object")],
)
def test_a_mask_that_selects_nothing_is_one_line(settings, part):
    with pytest.raises(UsageError) as raised:
        on_table(torch.tensor([0.05]), TableConfig(**settings), 32)
    message = str(raised.value)
    assert message.startswith("data.table: the mask of scene 0 has none of its")
    assert f"points on {part}" in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["cube_grasps", "shape_grasps"])
def test_a_model_trains_on_clouds_with_a_table(kind):
    settings = (f"data.kind={kind}", "data.table.object_share=0.6", "model.straighten=false")
    with_table, again, alone = (
        train_here("grasp_diffusion", *chosen).metrics["train/loss"]
        for chosen in (settings, settings, (f"data.kind={kind}", "model.straighten=false"))
    )
    assert with_table == again != alone


def test_a_scene_has_at_least_the_points_of_a_cloud():
    with pytest.raises(UsageError, match="scene_points should be at least the 256 points of a cloud"):
        tiny("grasp_diffusion", "data.points=256", "data.table.scene_points=128")
