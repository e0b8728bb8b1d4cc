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
def test_a_mask_selects_its_share(data, share, count):
    kinds = st.lists(st.sampled_from("otc"), min_size=12, max_size=12)
    scenes = data.draw(st.lists(kinds, min_size=1, max_size=5))
    masks = {kind: torch.tensor([[each == kind for each in scene] for scene in scenes]) for kind in "ot"}
    wanted = {"o": round(count * share)}
    wanted["t"] = count - wanted["o"]
    available = {kind: mask.sum(1) for kind, mask in masks.items()}
    if any(wanted[kind] and not available[kind].all() for kind in "ot"):
        with pytest.raises(UsageError, match=r"scene \d has none of its 12 points on the (object|table)"):
            select_by_mask(masks["o"], masks["t"], count, share)
        return
    selected = select_by_mask(masks["o"], masks["t"], count, share)
    assert selected.shape == (len(scenes), count)
    parts = dict(zip("ot", selected.split([wanted["o"], wanted["t"]], 1), strict=True))
    for kind, part in parts.items():
        assert masks[kind].gather(1, part).all()
        for row, limit in zip(part, available[kind].tolist(), strict=True):
            # None is repeated before all were selected.
            assert len(set(row.tolist())) == min(wanted[kind], limit)


@pytest.mark.parametrize("share", [0.25, 0.6, None])
@pytest.mark.parametrize("name", OBJECTS)
def test_clouds_show_the_object_and_the_table_beside_it(name, share):
    objects = OBJECTS[name].repeat_interleave(100, 0)
    torch.manual_seed(0)
    cloud = on_table(objects, TableConfig(object_share=share), 200)
    height = cloud[..., 2] + heights(objects)[:, None] / 2
    in_plan = torch.cat([cloud[..., :2], torch.zeros_like(cloud[..., :1])], 2)
    is_on_table = height.abs() < 1e-6
    is_on_object = (signed_distance(cloud, objects).abs() < 1e-6) & (height > 1e-6)
    assert (is_on_table | is_on_object).all()
    assert (signed_distance(in_plan, objects)[is_on_table] > 0).all()
    assert cloud[..., :2].norm(dim=-1).max() <= 0.15
    counts = is_on_object.sum(1).double()
    if share is not None:
        assert (counts == round(200 * share)).all()
    elif name == "cubes":
        # Of a cube, five sides are seen, and of the table what is beside the sixth.
        side = objects.double() ** 2
        seen = 5 * side / (4 * side + math.pi * 0.15**2)
        assert counts.mean().item() == pytest.approx(200 * seen.mean().item(), rel=0.02)
    for points in cloud[::50]:
        assert len(points.unique(dim=0)) == 200


@pytest.mark.parametrize(
    ("settings", "surface"),
    [({"radius_mm": 20}, "the table"), ({"radius_mm": 2000, "scene_points": 64}, "the object")],
)
def test_a_mask_that_selects_nothing_is_one_line(settings, surface):
    with pytest.raises(UsageError) as raised:
        on_table(torch.tensor([0.05]), TableConfig(**settings), 32)
    message = str(raised.value)
    assert message.startswith("data.table: scene 0 has none of its")
    assert f"points on {surface}" in message
    assert message.endswith("change table.radius_mm or table.scene_points")
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["cube_grasps", "shape_grasps"])
def test_a_model_trains_on_clouds_with_a_table(kind):
    settings = (f"data.kind={kind}", "data.table.object_share=0.6", "model.straighten=false")
    with_table, again, alone = (
        train_here("grasp_diffusion", *chosen).metrics["train/loss"]
        for chosen in (settings, settings, (f"data.kind={kind}", "model.straighten=false"))
    )
    assert with_table == again != alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.table.scene_points=128"], "scene_points should be at least the 256 points of a cloud"),
        (["data.table.object_share=0.001"], "0.001 of 256 points leaves none on the object"),
        (["data.table.object_share=0.999"], "0.999 of 256 points leaves none on the object or none on the table"),
    ],
)
def test_a_table_that_shows_only_one_of_both_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        tiny("grasp_diffusion", "data.points=256", *settings)
