import numpy as np
import pytest
import torch
from PIL import Image

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.vision.image_folder import is_held_out
from runner.recipe.loader import load
from runner.train.assemble import assemble
from runner.train.step import Step

RECIPE = """\
name: folder
device: cpu
model: {{kind: classifier, widths: [8]}}
data: {{kind: image_folder, folder: '{folder}', side: 8, held_out: 0.3, workers: {workers}}}
train: {{epochs: 2, batch_size: 8}}
"""


@pytest.fixture
def folder(tmp_path):
    """Bright and dark images, of several sizes and modes."""
    generator = np.random.default_rng(0)
    for name, base in (("bright", 200), ("dark", 0)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(24):
            pixels = generator.integers(base, base + 50, (9 + number, 12, 3), dtype=np.uint8)
            image = Image.fromarray(pixels)
            (image.convert("L") if number % 3 == 0 else image).save(tmp_path / "images" / name / f"{number}.png")
    (tmp_path / "images" / "bright" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def pipeline(folder, workers=0, *sets):
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, workers=workers))
    return assemble(load(recipe, sets, Registry()))


def names(images):
    return {f"{path.parent.name}/{path.name}" for path, _ in images.files}


def test_every_image_is_on_one_side_and_stays_there(folder):
    source = pipeline(folder).source
    train, held_out = names(source.train), names(source.held_out)
    assert not train & held_out
    assert len(train | held_out) == 48
    assert 0.1 < len(held_out) / 48 < 0.5
    assert source.sizes == {"classes": 2}
    for number in range(100, 110):
        Image.new("L", (8, 8)).save(folder / "dark" / f"{number}.png")
    grown = pipeline(folder).source
    assert train < names(grown.train)
    assert held_out < names(grown.held_out)
    assert grown.fingerprint() != source.fingerprint()


def test_the_share_that_is_held_out_is_about_the_one_asked_for(tmp_path):
    held_out = [is_held_out(tmp_path / "class" / f"{number}.png", 0.2) for number in range(2000)]
    assert 0.16 < sum(held_out) / 2000 < 0.24


@pytest.mark.parametrize(("grey", "channels"), [("true", 1), ("false", 3)])
def test_images_are_scaled_to_one_size(folder, grey, channels):
    made = pipeline(folder, 0, f"data.grey={grey}")
    batch = made.slots.next_batch(8, made.progress)
    assert batch["image"].shape == (8, channels, 8, 8)
    assert batch["image"].dtype == torch.float32
    bright = batch["image"].mean((1, 2, 3)) > 0.5
    assert torch.equal(bright, batch["label"] == 0)


def test_two_workers_draw_what_none_draws_and_resume_in_the_middle_of_an_epoch(folder):
    alone, resumed = Step(pipeline(folder)), pipeline(folder, workers=2)
    for _ in range(2):
        alone()
    resumed.load_state_dict(alone.pipeline.state_dict())
    workers = Step(resumed)
    for _ in range(4):
        one, other = alone(), workers()
        assert torch.equal(alone.batch["image"], workers.batch["image"])
        assert torch.equal(one["loss"].sum, other["loss"].sum)
    assert resumed.source.evaluate(resumed.learner) == alone.source.evaluate(alone.learner)


@pytest.mark.parametrize("case", ["missing", "one class", "no image", "all held out"])
def test_a_folder_that_is_not_as_it_should_be_is_named(folder, case):
    sets = []
    if case == "missing":
        sets = ["data.folder=/nowhere/at/all"]
    elif case == "one class":
        sets = [f"data.folder={folder.parent}"]
    elif case == "no image":
        (folder / "empty").mkdir()
    else:
        sets = ["data.held_out=0.999999"]
    with pytest.raises(UsageError, match=r"data\.(folder|held_out): "):
        pipeline(folder, 0, *sets)


def test_a_file_that_is_no_image_is_named(folder):
    for path in folder.rglob("*.png"):
        path.write_text("broken")
    with pytest.raises(UsageError, match=r"\.png cannot be read as an image"):
        pipeline(folder)
