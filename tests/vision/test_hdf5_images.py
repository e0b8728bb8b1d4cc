"""Labelled images of an HDF5 file as data of a recipe."""

import h5py
import numpy as np
import pytest
import torch
from hdf5_files import SAMPLES, damage, images
from hypothesis import given
from hypothesis import strategies as st
from running import NoDisplay
from zarr_groups import zarr_images

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.vision.stored_images import held_out_rows
from runner.recipe.loader import load
from runner.recipe.yaml_nodes import RecipeError
from runner.tracking import Workspace
from runner.training.pipeline import assemble
from runner.training.run import run
from runner.training.step import Step

RECIPE = """\
name: hdf5
device: cpu
model: {kind: mlp, widths: [8]}
data: {kind: hdf5_images, file: images.h5, held_out: 0.3}
train: {epochs: 2, batch_size: 8}
tracking: {system_metrics: false}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return images(tmp_path / "images.h5")


def recipe_of(file, *sets):
    return load(file.parent / "recipe.yaml", sets, Registry())


def pipeline(file, *sets):
    return assemble(recipe_of(file, *sets))


def test_two_workers_draw_the_same_and_resume_in_the_middle_of_an_epoch(file):
    baseline = Step(pipeline(file))
    for _ in range(2):
        baseline()
    resumed = pipeline(file, "data.workers=2")
    resumed.load_state_dict(baseline.pipeline.state_dict())
    candidate = Step(resumed)
    for _ in range(5):
        left, right = baseline(), candidate()
        assert torch.equal(baseline.batch["image"], candidate.batch["image"])
        assert torch.equal(left["loss"].sum, right["loss"].sum)
    assert resumed.source.evaluate(resumed.learner) == baseline.pipeline.source.evaluate(baseline.pipeline.learner)


def test_images_have_the_labels_of_their_rows(file):
    source = pipeline(file).source
    assert source.sizes == {"classes": 2}
    assert len(source.train) + len(source.held_out) == SAMPLES
    batches = list(source.held_out_batches())
    assert torch.equal(torch.cat([batch["label"] for batch in batches]), source.held_out_labels())
    for batch in batches:
        assert batch["image"].dtype == torch.float32
        assert 0 <= batch["image"].min() <= batch["image"].max() <= 1
        assert torch.equal(batch["image"].mean((1, 2, 3)) < 0.5, batch["label"] == 1)


@pytest.mark.parametrize(
    ("change", "sets"),
    [
        (lambda image: image, ()),
        (lambda image: image.astype(np.uint16) * 257, ()),
        (lambda image: image.astype(np.float32) / np.float32(255), ()),
        (lambda image: image.transpose(0, 2, 3, 1), ("data.channels_last=true",)),
    ],
)
def test_images_of_every_form_are_the_same(file, change, sets):
    expected = next(pipeline(file).source.held_out_batches())
    with h5py.File(file) as opened:
        image = opened["image"][...]
    images(file, image=change(image))
    batch = next(pipeline(file, *sets).source.held_out_batches())
    assert torch.allclose(batch["image"], expected["image"], atol=1e-7)
    assert batch["image"].is_contiguous()


def test_an_array_without_channels_is_one_grey_channel(file):
    images(file, image=np.full((SAMPLES, 9, 7), 51, np.uint8))
    assert pipeline(file).source.shapes["image"] == (1, 9, 7)


@given(count=st.integers(1, 3000), more=st.integers(0, 1000), share=st.floats(0.05, 0.95))
def test_no_row_changes_sides_when_rows_are_appended(count, more, share):
    rows = held_out_rows(count, share)
    assert np.array_equal(held_out_rows(count + more, share)[:count], rows)
    assert abs(held_out_rows(20_000, share).mean() - share) < 0.02


def test_balanced_classes_and_folds_work(file):
    images(file, label=np.arange(SAMPLES) % 8 // 7)
    balanced = pipeline(file, "data.sampling=balanced", "train.batch_size=16")
    assert balanced.source.labels().float().mean() < 0.2
    drawn = torch.cat([balanced.source.draw(16, balanced.progress)["label"] for _ in range(12)])
    assert 0.35 < drawn.float().mean() < 0.65
    folded = pipeline(file, "data.folds={count: 3, index: 1, by: class}").source
    assert len(folded.train) + len(folded.held_out) == SAMPLES


@pytest.mark.parametrize(
    ("changes", "sets", "text"),
    [
        ({}, ["data.file=nowhere.h5"], "data.file: no 'nowhere.h5' in"),
        ({}, ["data.image=images"], "data.image: 'images' in .* is missing - did you mean 'image'"),
        ({}, ["data.image=label"], r"data.image: 'label' in .* is \[N\], and should be \[N, C, H, W\]"),
        ({}, ["data.label=image"], r"data.label: 'image' in .* is \[N, 3, 8, 8\] of type uint8; labels are whole"),
        ({}, ["data.held_out=0.0001"], "data.held_out: 0.0001: none of the 48 images is held out"),
        ({}, ["data.held_out=0.9999"], "data.held_out: 0.9999: all images of class 0 are held out"),
        ({"label": np.arange(SAMPLES) - 5}, ["data.label=label"], "data.label: .*: row 0 is -5; classes are numbers"),
        ({"image": np.zeros((SAMPLES, 32, 32, 3), "u1")}, ["data.image=image"], "has 32 channels; .*channels_last"),
        ({"image": np.zeros((SAMPLES, 8, 8), "i8")}, ["data.image=image"], "is of type int64; images are one of bool"),
        ({"image": np.zeros((0, 8, 8), "u1"), "label": np.zeros(0, "i8")}, ["data.label=label"], "has no row"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_place(file, changes, sets, text):
    images(file, **changes)
    with pytest.raises(RecipeError, match=text) as caught:
        pipeline(file, *sets)
    (problem,) = caught.value.problems
    assert problem.path == sets[0].partition("=")[0]
    assert "\n" not in problem.message


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("workers", [0, 1])
def test_damage_that_a_training_meets_has_the_place_of_the_file_in_the_recipe(file, workers):
    damage(file, "image", 33)
    recipe = recipe_of(file, f"data.workers={workers}")
    with pytest.raises(UsageError) as caught:
        run(recipe, Registry(), Workspace(), NoDisplay())
    (problem,) = caught.value.problems
    assert problem.path == "data.file"
    assert "recipe.yaml:4:" in str(caught.value)
    assert "cannot be read at row 3" in problem.message


def test_another_image_is_another_fingerprint(file):
    first = pipeline(file).source.fingerprint()
    images(file, image=np.zeros((SAMPLES, 3, 8, 8), np.uint8))
    assert first is not None
    assert pipeline(file).source.fingerprint() != first


def test_a_zarr_group_is_the_same_data(file):
    group = zarr_images(file.with_name("images.zarr"))
    expected = pipeline(file, "data.workers=1").source
    source = pipeline(file, "data.workers=1", "data.kind=zarr_images", f"data.file={group}").source
    for left, right in zip(expected.held_out_batches(), source.held_out_batches(), strict=True):
        assert torch.equal(left["image"], right["image"])
        assert torch.equal(left["label"], right["label"])
    assert source.fingerprint() is not None
    with pytest.raises(RecipeError, match=r"data\.file: no such file or folder: .*nowhere\.zarr"):
        pipeline(file, "data.kind=zarr_images", f"data.file={group.with_name('nowhere.zarr')}")
