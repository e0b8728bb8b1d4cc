"""Azimuth offsets of classes that are trained without poses."""

import pytest
import torch
from pydantic import ValidationError
from running import tiny

from runner.plugins.radiance.alignment import OFFSETS, best_offsets, shift_azimuth
from runner.plugins.radiance.camera import angles_of, camera_from_angles
from runner.plugins.radiance.config import PosedViewsConfig, RadianceGanConfig
from runner.plugins.radiance.reading import read
from runner.training.pipeline import assemble
from runner.training.step import Step

AZIMUTHS = 24


@pytest.fixture(scope="module")
def views():
    synthetic = read(PosedViewsConfig(synthetic=True))
    pose = angles_of(synthetic.camera)
    horizon = (pose[:, 1] - 0.4).abs() < 1e-3
    image = synthetic.image.float() / 127.5 - 1
    tables = {"image": image, "label": synthetic.label, "pose": pose, "camera": synthetic.camera}
    return {name: table[horizon] for name, table in tables.items()}


class ShiftedRenderer:
    """Renders the real views of each class at azimuths that are off by a number of steps."""

    def __init__(self, views, steps):
        self.images = views["image"].view(3, AZIMUTHS, 3, 32, 32)
        self.steps = steps

    def inputs(self, batch):
        return batch

    def predict(self, batch):
        azimuth = angles_of(batch["camera"])[:, 0]
        number = (azimuth * AZIMUTHS).round().long() - torch.tensor(self.steps)[batch["label"]]
        return self.images[batch["label"], number % AZIMUTHS]


@pytest.mark.parametrize("steps", range(AZIMUTHS))
@pytest.mark.parametrize("other", [0, 5])
def test_the_offset_of_every_class_is_found(views, steps, other):
    offsets = best_offsets(ShiftedRenderer(views, [steps, other, steps]), views)
    assert [offsets[label] * OFFSETS for label in range(3)] == pytest.approx([steps, other, steps])


@pytest.mark.parametrize("turn", [0.0, 0.3, 0.999])
def test_shifted_views_have_the_pose_of_their_cameras(turn):
    pose = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    views = {"pose": pose, "camera": camera_from_angles(pose, 2.0)}
    shifted = shift_azimuth(views, torch.full((20,), turn))
    torch.testing.assert_close(shifted["camera"], camera_from_angles(shifted["pose"], 2.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("condition", "planes", "is_free"),
    [(("class", "pose", "position"), 7, False), (("class", "position"), 4, True), (("class",), 2, True)],
)
def test_the_discriminator_is_shown_what_the_condition_names(condition, planes, is_free):
    pipeline = assemble(tiny("graf", f"model.condition={list(condition)}"))
    learner = pipeline.learner
    drawn = Step(pipeline).next()
    patch = learner.patch_of(drawn.noise["discriminator"], 0.5)
    shown = learner.condition_of(drawn.batch, patch)
    turned = {**drawn.batch, "pose": drawn.batch["pose"] + 0.1}
    assert shown.shape == (4, planes, 8, 8)
    assert torch.equal(shown, learner.condition_of(turned, patch)) == ("pose" not in condition)
    assert learner.has_free_azimuth == is_free
    metrics = pipeline.source.compared(learner, [next(iter(pipeline.source.held_out_batches()))])
    assert any(name.startswith("offset_") for name in metrics) == is_free


@pytest.mark.parametrize("condition", [(), ("class", "class"), ("azimuth",), "class", ("class", "pose", "class")])
def test_a_condition_of_anything_else_is_refused(condition):
    with pytest.raises(ValidationError, match="condition"):
        RadianceGanConfig(condition=condition)
