"""The source of images with poses: what is held out, and what is measured."""

import numpy as np
import pytest
import torch
from PIL import Image
from running import tiny

from runner.plugins.radiance.views import held_out_azimuths
from runner.training.pipeline import assemble


@pytest.fixture(scope="module")
def pipeline():
    return assemble(tiny("graf"))


class Oracle:
    """Answers with the real images, or with those of other views."""

    def __init__(self, learner, source, shift=0):
        self.learner, self.source, self.shift = learner, source, shift
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.learner, name)

    def predict(self, inputs):
        held_out = self.source.held_out.tensors
        same = (held_out["camera"][None] - inputs["camera"][:, None]).abs().sum((2, 3))
        other_class = held_out["label"][None] != inputs["label"][:, None]
        index = same.masked_fill(other_class, torch.inf).argmin(1)
        return held_out["image"][index.roll(self.shift)]


@pytest.mark.parametrize("every", [2, 5, 6])
def test_whole_azimuths_of_every_class_are_held_out(every):
    u = (torch.arange(24) / 24).repeat(3)
    label = torch.arange(3).repeat_interleave(24)
    held_out = held_out_azimuths(u, label, every)
    for each in range(3):
        assert held_out[label == each].nonzero().flatten().tolist() == list(range(0, 24, every))


def test_azimuths_that_differ_by_rounding_are_one():
    u = torch.tensor([0.0, 1e-7, 0.5, 0.5 + 1e-7, 1 - 1e-7])
    assert held_out_azimuths(u, torch.zeros(5, dtype=torch.long), 2).tolist() == [True, True, False, False, True]


def test_nothing_that_is_held_out_is_trained_on(pipeline):
    source = pipeline.source
    train, held_out = source.train.tensors, source.held_out.tensors
    distance = torch.cdist(train["camera"].flatten(1), held_out["camera"].flatten(1))
    assert distance.min() > 1e-3
    assert len(held_out["label"]) == 2 * 2 * 4


def test_perfect_answers_measure_as_perfect_and_others_do_not(pipeline):
    source, learner = pipeline.source, pipeline.learner
    batches = [*source.held_out_batches()]
    perfect = source.compared(Oracle(learner, source), batches)
    assert perfect["swd"] < 0.01
    assert perfect["psnr"] == pytest.approx(100, abs=1e-3)
    assert (perfect["iou"], perfect["pose_control"]) == (1.0, 1.0)
    assert perfect["label_control"] > 0.8
    shuffled = source.compared(Oracle(learner, source, shift=1), batches)
    assert shuffled["psnr"] < 30
    assert shuffled["pose_control"] < 0.9


def test_a_turntable_turns_once_at_a_constant_speed(pipeline, tmp_path):
    # The real views differ by azimuth, unlike the renders of some initial weights.
    oracle = Oracle(pipeline.learner, pipeline.source)
    pipeline.source.render(oracle, tmp_path / "turntable.gif")
    durations = []
    with Image.open(tmp_path / "turntable.gif") as image:
        assert image.size == (2 * 128, 128)
        for number in range(image.n_frames):
            image.seek(number)
            durations.append(image.info["duration"])
    # Equal frames are stored as one that lasts longer.
    assert len(durations) >= 4
    assert sum(durations) == 24 * 90


def test_a_grid_has_views_by_azimuth_and_enlarged_views(pipeline, tmp_path):
    pipeline.source.render(pipeline.learner, tmp_path / "views.png")
    cell = 128 + 4
    with Image.open(tmp_path / "views.png") as image:
        assert image.size == (8 * cell + 4, 2 * (48 + 2 * cell + 4))
        pixels = torch.from_numpy(np.array(image)).float()
    real = pixels[48 + 2 * cell + 4 + 48 :, 3 * cell + 4 :][:128, :128]
    held_out = pipeline.source.held_out.tensors
    numbers = (held_out["label"] == 0).nonzero().flatten()
    expected = (held_out["image"][numbers[len(numbers) // 2]] + 1) * 127.5
    # Pixels are repeated eight times, so the first of each is compared.
    assert (real[::8, ::8].permute(2, 0, 1) - expected).abs().max() <= 1


def test_the_place_of_a_colour_in_its_pixel_moves_the_optical_axis():
    centred, cornered = (
        assemble(tiny("graf", f"data.pixel_offset={offset}")).source.tables["lens"] for offset in (0.5, 0.0)
    )
    assert (cornered - centred).tolist() == pytest.approx([0, 0, 1 / 16, 1 / 16])
