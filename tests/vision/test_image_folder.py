import json
import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

from runner.api import UsageError
from runner.plugin.registry import Registry
from runner.plugins.vision.image_folder import Images, is_held_out
from runner.recipe.loader import load
from runner.serve.model import served
from runner.training.pipeline import assemble
from runner.training.step import Step

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


# --- pixels -----------------------------------------------------------------------------------------------------------

RAMP = np.linspace(0, 1, 64).reshape(8, 8)
"""What a viewer shows of every image below, as shares of white."""


def saved(path, image, **options):
    image.save(path, **options)
    return Images([(path, 0)], 8, False)[0][0].permute(1, 2, 0).float() / 255


def in_bytes(shares):
    return (shares * 255).round().astype(np.uint8)


def repeated(shares):
    return np.repeat(shares[..., None], 3, axis=2)


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("16.png", Image.fromarray((RAMP * 65535).round().astype(np.uint16))),
        ("16.tif", Image.fromarray((RAMP * 65535).round().astype(">u2").astype(np.uint16))),
        ("32.tif", Image.fromarray((RAMP * 65535).round().astype(np.int32))),
        ("float.tif", Image.fromarray(RAMP.astype(np.float32))),
        ("8.png", Image.fromarray(in_bytes(RAMP))),
        ("8.tif", Image.fromarray(in_bytes(RAMP))),
        ("palette.png", Image.fromarray(in_bytes(RAMP)).convert("P")),
        ("rgb.bmp", Image.fromarray(in_bytes(repeated(RAMP)))),
        ("cmyk.tif", Image.fromarray(in_bytes(repeated(RAMP))).convert("CMYK")),
        ("lossless.webp", Image.fromarray(in_bytes(repeated(RAMP)))),
    ],
)
def test_levels_are_shares_of_white_whatever_the_format(tmp_path, name, image):
    options = {"lossless": True} if name.endswith("webp") else {}
    pixels = saved(tmp_path / name, image, **options)
    assert np.abs(pixels.numpy() - repeated(RAMP)).max() <= 1 / 255
    grey = Images([(tmp_path / name, 0)], 8, True)[0][0]
    assert np.abs(grey[0].numpy() / 255 - RAMP).max() <= 1.5 / 255


@pytest.mark.parametrize("name", ["photo.png", "photo.tif", "photo.jpg"])
@pytest.mark.parametrize(
    ("orientation", "upright"),
    [(1, lambda x: x), (3, lambda x: x[::-1, ::-1]), (6, lambda x: x.T[:, ::-1]), (8, lambda x: x.T[::-1])],
)
def test_the_orientation_of_a_camera_is_applied(tmp_path, name, orientation, upright):
    stored = np.zeros((8, 8))
    stored[:4] = stored[:, :2] = 1
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = saved(tmp_path / name, Image.fromarray(in_bytes(repeated(stored))), exif=exif)
    assert np.abs(pixels.numpy() - repeated(upright(stored))).max() <= (0.2 if name.endswith("jpg") else 0)


def transparent(below):
    pixels = np.full((8, 8, 4), below, np.uint8)
    pixels[..., 3] = in_bytes(RAMP)
    return Image.fromarray(pixels)


def test_what_is_transparent_is_white(tmp_path):
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 0, 0, 0, 0, 0])
    palette.paste(0, (0, 0, 4, 8))
    half = np.ones((8, 8))
    half[:, 4:] = 0
    # Black with an alpha of one half is grey on white.
    assert np.abs(saved(tmp_path / "black.png", transparent(0)).numpy() - repeated(1 - RAMP)).max() <= 1 / 255
    assert saved(tmp_path / "white.png", transparent(255)).eq(1).all()
    assert np.abs(saved(tmp_path / "grey.png", transparent(0).convert("LA")).numpy() - repeated(1 - RAMP)).max() < 0.01
    shown = saved(tmp_path / "palette.png", palette, transparency=0)
    assert np.array_equal(shown.numpy(), repeated(half))


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (np.full((8, 8), 70_000, np.int32), "its values range from 70,000 to 70,000; convert them to 16-bit levels"),
        (np.full((8, 8), -3, np.int32), "its values range from -3 to -3; convert them to 16-bit levels"),
        (np.full((8, 8), 255, np.float32), "its values range from 255 to 255; convert them to floats from 0 to 1"),
        (np.full((8, 8), np.nan, np.float32), "its values range from nan to nan; convert them to floats from 0 to 1"),
    ],
)
def test_levels_of_an_unknown_range_are_refused(tmp_path, levels, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        saved(tmp_path / "unknown.tif", Image.fromarray(levels))


# --- names and classes ------------------------------------------------------------------------------------------------


def fill(folder, names):
    os.makedirs(folder)
    for name in names:
        with open(os.path.join(folder, name), "wb") as file:
            Image.new("L", (8, 8)).save(file, "PNG")


@pytest.mark.parametrize("odd", [b"caf\xe9", b"\xff\xfe", "été".encode(), b"two\nlines"])
def test_names_that_are_not_utf_8_are_read(tmp_path, odd):
    many = [b"%d.png" % number for number in range(16)]
    root = os.fsencode(tmp_path / "images")
    fill(os.path.join(root, b"a"), [*many, odd + b".png"])
    fill(os.path.join(root, odd), many)
    source = pipeline(tmp_path / "images").source
    assert len(names(source.train) | names(source.held_out)) == 33
    assert source.fingerprint() == pipeline(tmp_path / "images").source.fingerprint()


@pytest.mark.parametrize(("workers", "content"), [(0, b"no image"), (1, b"\x89PNG\r\n\x1a\n"), (1, "truncated")])
def test_a_damaged_image_is_one_line_with_its_name_and_number(tmp_path, workers, content):
    root = os.fsencode(tmp_path / "images")
    many = [b"%d.png" % number for number in range(16)]
    fill(os.path.join(root, b"a"), many)
    fill(os.path.join(root, b"b"), many)
    train = pipeline(tmp_path / "images").source.train
    number = len(train) - 1
    damaged = train.files[number][0].with_name("zz\udce9.png")
    os.rename(train.files[number][0], damaged)
    if content == "truncated":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)).save(damaged, "PNG")
        content = damaged.read_bytes()[:1000]
    damaged.write_bytes(content)
    made = pipeline(tmp_path / "images", workers)
    batches = (made.slots.next_batch(8, made.progress) for _ in range(4))
    with pytest.raises(UsageError) as caught:
        list(batches)
    message = str(caught.value)
    assert re.search(r"b/zz\\xe9\.png cannot be read as an image: .*; remove or repair it \(sample \d+ of the", message)
    assert "\n" not in message


def fill_one_side(folder, label, count, *, is_trained):
    """Writes images of a class that all are trained on, or all held out."""
    candidates = (f"{number}.png" for number in range(999))
    side = [name for name in candidates if is_held_out(folder / label / name, 0.3) is not is_trained]
    fill(os.fsencode(folder / label), [name.encode() for name in side[:count]])


CLASSES = pytest.mark.parametrize("labels", [{"rare": 1}, {"a": 3}, {"été": 2}, {"first": 1, "zebra": 4}], ids=str)
COMMON = [b"%d.png" % number for number in range(16)]


@CLASSES
def test_a_class_that_would_never_be_trained_on_is_refused(tmp_path, labels):
    images = tmp_path / "images"
    fill(os.fsencode(images / "common"), COMMON)
    for label, count in labels.items():
        fill_one_side(images, label, count, is_trained=False)
    label, count = next(iter(labels.items()))
    message = f"all {count} images of class '{label}' are held out, so it would never be trained on"
    with pytest.raises(UsageError, match=message):
        pipeline(images)


@CLASSES
def test_a_class_that_would_never_be_evaluated_is_reported(tmp_path, labels, caplog):
    images = tmp_path / "images"
    fill(os.fsencode(images / "common"), COMMON)
    for label, count in labels.items():
        fill_one_side(images, label, count, is_trained=True)
    assert pipeline(images).source.sizes == {"classes": 1 + len(labels)}
    for label, count in labels.items():
        assert f"none of the {count} images of class '{label}' is held out: it is not evaluated" in caplog.text


def test_transposed_convolutions_learn_from_images_of_an_odd_size(folder):
    made = pipeline(folder, 0, "model={kind: conv_classifier, width: 8, shift: 1}", "data.side=9")
    step = Step(made)
    losses = [step()["loss"].sum.item() for _ in range(3)]
    assert all(loss > 0 for loss in losses)
    assert made.source.shapes["image"] == (3, 9, 9)


@pytest.mark.parametrize("odd", ["Ünïcode ñ", os.fsdecode(b"caf\xe9")])
def test_an_answer_names_the_class(tmp_path, odd):
    folders = ["0", "1", "10", "2", odd]
    for name in folders:
        fill(tmp_path / "images" / name, [f"{number}.png" for number in range(16)])
    learner = pipeline(tmp_path / "images").learner
    answers = learner.answered([None] * 5, torch.eye(5))
    assert [answer.label for answer in answers] == [0, 1, 2, 3, 4]
    assert [answer.name for answer in answers[:4]] == ["0", "1", "10", "2"]
    assert answers[4].model_dump_json()
    config = learner.config
    about = {"classes": list(learner.context.classes)}
    assert json.dumps(served("it", learner, config, about).about, ensure_ascii=False).encode()
