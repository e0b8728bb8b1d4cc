import math
from functools import cache
from itertools import chain

import pytest
import torch
from running import tiny

from runner.plugin.progress import Progress
from runner.plugins.grasps.geometry import rotated, yaw
from runner.plugins.grasps.shapes import signed_distance
from runner.plugins.grasps.transfer import is_strict
from runner.plugins.grasps.wrenches import contacts, q1
from runner.system.errors import UsageError
from runner.training.pipeline import assemble

SHAPES = ("data.kind=shape_grasps", "data.shapes=4")


@cache
def made(*sets, name="grasp_diffusion"):
    return assemble(tiny(name, *SHAPES, *sets))


def rows_of(source):
    """The objects of a source and their grasps, by part."""
    division = source.division(source.config)
    return division.grasps, division[1:]


def test_grasps_are_strict_on_their_shape_and_parts_have_nothing_in_common():
    source = made().source
    grasps, parts = rows_of(source)
    assert [len(part) for part in parts] == [4, 2, 2]
    kinds = [[int(grasps.objects[rows[0], 3]) for rows in part] for part in parts]
    assert kinds == [[0, 1, 0, 1], [0, 1], [2, 3]]
    objects = [{tuple(grasps.objects[rows[0]].tolist()) for rows in part} for part in parts]
    assert sum(map(len, objects)) == len(set.union(*objects)) == 8
    for rows in chain(*parts):
        (shape,) = grasps.objects[rows].unique(dim=0)
        assert bool(is_strict(source.hand, grasps.grasp[rows], shape).all())
    # Joints are not changed on the way from a cube, so they identify a grasp.
    joints = [{tuple(grasps.grasp[row, 3:19].tolist()) for rows in part for row in rows} for part in parts]
    assert not joints[0] & (joints[1] | joints[2])


def test_shapes_depend_on_their_seed_alone():
    shape = rows_of(made().source)[0].objects
    assert torch.equal(rows_of(made("seed=5").source)[0].objects, shape)
    assert not torch.equal(rows_of(made("data.shape_seed=1").source)[0].objects[0], shape[0])
    assert torch.equal(rows_of(made("data.shapes=6").source)[0].objects[0], shape[0])
    assert all(torch.equal(made().source.unseen[key], made("seed=5").source.unseen[key]) for key in ("cloud", "shape"))


def test_clouds_lie_on_the_surface_and_are_turned_with_their_grasps():
    source = made().source
    grasps = source.train.grasps
    lower, upper = source.tables["lower"], source.tables["upper"]
    for batch in (source.draw(4, Progress("updates", 1)), source.held_out.tensors, source.unseen):
        back = batch["turn"].transpose(1, 2)
        cloud = batch["cloud"] @ back.transpose(1, 2)
        assert float(signed_distance(cloud, batch["shape"]).abs().max()) < 1e-6
        grasp = rotated(lower + (batch["grasp"] + 1) / 2 * (upper - lower), back[:, None])
        nearest = (grasp.flatten(0, 1)[:, None] - grasps.grasp).abs().amax(2).amin(1)
        assert float(nearest.max()) < 1e-5


class Planted:
    """Answers with the grasps of the scenes, moved by a distance along z."""

    def __init__(self, source, distance=0.0):
        self.source, self.distance = source, distance

    def inputs(self, batch):
        return batch

    def predict(self, batch):
        lower, upper = self.source.tables["lower"], self.source.tables["upper"]
        grasp = lower + (batch["grasp"] + 1) / 2 * (upper - lower)
        grasp[..., 2] += self.distance
        return self.source.hand.limited(grasp)

    def evaluating(self):
        return torch.no_grad()


def test_evaluation_finds_good_grasps_and_rejects_bad_ones():
    source = made().source
    good = source.sampled(Planted(source), 16, None)
    assert good["strict"] == good["valid"] == good["unseen_strict"] == good["coverage"] == 1
    assert good["matched_mm"] < 1e-3
    assert {"q1", "unseen_q1", "swapped_valid", "unseen_diversity_mm"} <= good.keys()
    # The palm of the synthetic hand is above the object.
    for distance in (-0.03, 0.3):
        bad = source.sampled(Planted(source, distance), 16, None)
        assert bad["strict"] == bad["unseen_strict"] == 0


def test_grasps_are_turned_back_by_the_symmetry_of_their_shape_only():
    source = made().source
    objects = torch.tensor([[0.06, 0.08, 0.07, 0], [0.07, 0.07, 0.07, 1], [0.06, 0.069, 0.07, 2]])
    angle = torch.tensor([[0.1, 1.5, 3.0]]).expand(3, 3)
    nearest = source.equivalent_turns(angle, objects)
    sixth = math.pi / 3
    expected = torch.tensor([[0.0, 0.0, math.pi], [0.1, 1.5, 3.0], [0.0, sixth, 3 * sixth]])
    torch.testing.assert_close(nearest, expected)


def test_contacts_are_on_the_surface_and_their_ball_turns_with_the_shape():
    source = made().source
    grasps, (train, _, unseen) = rows_of(source)
    rows = torch.cat([numbers[:3] for numbers in (*train[:2], *unseen)])
    grasp, objects = grasps.grasp[rows], grasps.objects[rows]
    point, normal, is_contact = contacts(source.hand, grasp, objects)
    assert bool((is_contact.sum(1) >= 3).all())
    assert float(signed_distance(point, objects)[is_contact].abs().max()) < 1e-6
    torch.testing.assert_close(normal[is_contact].norm(dim=-1), torch.ones(int(is_contact.sum())))
    # Along the normal, also at an edge, the distance grows by as much.
    outside = signed_distance(point - 1e-3 * normal, objects)[is_contact]
    torch.testing.assert_close(outside, torch.full_like(outside, 1e-3), atol=2e-6, rtol=0)
    half_turn = rotated(grasp[:3], yaw(torch.tensor(math.pi)))
    torch.testing.assert_close(
        q1(source.hand, half_turn, objects[:3], edges=4),
        q1(source.hand, grasp[:3], objects[:3], edges=4),
        atol=1e-4,
        rtol=0,
    )


def test_shapes_of_the_test_are_other_ones():
    source = made("data.test=0.5", "data.shapes=12").source

    def shapes():
        return [{tuple(row) for row in batch["shape"].tolist()} for batch in (source.held_out.tensors, source.unseen)]

    validated = shapes()
    with source.testing():
        tested = shapes()
    assert all(validated)
    assert all(tested)
    assert not any(left & right for left, right in zip(validated, tested, strict=True))


@pytest.mark.parametrize("name", ["grasp_diffusion", "grasp_latent", "grasp_cvae"])
def test_learners_of_grasps_train_and_answer(name):
    pipeline = made(name=name)
    source, learner = pipeline.source, pipeline.learner
    batch = source.draw(4, Progress("updates", 1))
    loss = learner.loss(batch, learner.noise(batch, torch.Generator().manual_seed(0)), Progress("updates", 6))
    assert bool(loss.sum.isfinite())
    metrics = source.evaluate(learner)
    assert {*pipeline.recipe.headline, "loss"} <= metrics.keys()
    outline = tiny(name, *SHAPES, "data.synthetic=false").data.outline(4).batch
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == {
        key: tuple(tensor.shape) for key, tensor in outline.items()
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.largest_mm=40", r"data\.largest_mm: should exceed smallest_mm \(50\)"),
        ("data.smallest_mm=1", "greater than or equal to 10"),
        ("data.shapes=1", "greater than or equal to 2"),
    ],
)
def test_impossible_extents_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        tiny("grasp_diffusion", *SHAPES, setting)


def test_limits_without_grasps_are_one_clear_line(monkeypatch):
    monkeypatch.setattr("runner.plugins.grasps.shape_grasps.ATTEMPTS", 2)
    with pytest.raises(UsageError, match=r"largest_mm: none of 2 shapes \(cuboid, 10 to 20 mm\).*include 70 to 85 mm"):
        assemble(tiny("grasp_diffusion", *SHAPES, "data.smallest_mm=10", "data.largest_mm=20"))
