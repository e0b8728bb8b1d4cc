"""Archives and folders of images with poses: what is read, and what is said of what cannot be."""

import csv
import math

import numpy as np
import pytest
import torch
from PIL import Image
from running import tiny

from runner.api import UsageError
from runner.plugins.radiance.camera import angles_of, camera_from_angles
from runner.plugins.radiance.config import PosedViewsConfig
from runner.plugins.radiance.reading import COLUMNS, lens_of, read
from runner.training.pipeline import assemble
from runner.training.step import Step

ANGLES = [(0.1, 0.4), (0.35, 0.4), (0.6, 0.3), (0.85, 0.2)]
CAMERAS = camera_from_angles(torch.tensor(ANGLES), 2.5)
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)


def poses(convention):
    """The rows of ANGLES in a convention."""
    if convention == "angles":
        return ANGLES
    if convention == "direction":
        return torch.cat([CAMERAS[..., 3], -CAMERAS[..., 2]], -1).tolist()
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] if convention == "opencv" else [1.0] * 4)
    return (CAMERAS * signs).flatten(1).tolist()


def folder_of(path, convention="angles", images=PIXELS, **changed):
    """A folder with images and their table, some of whose cells are changed."""
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(path / f"{number}.png")
    rows = [
        {"file": f"{number}.png", "label": "ab"[number % 2], **dict(zip(COLUMNS[convention], pose, strict=True))}
        for number, pose in enumerate(poses(convention))
    ]
    rows[2] |= changed
    with (path / "poses.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def views_of(path, **settings):
    place = {"folder": path} if path.is_dir() else {"file": str(path)}
    return read(PosedViewsConfig(**place, **settings))


@pytest.mark.parametrize("convention", COLUMNS)
def test_every_convention_describes_the_same_cameras(convention, tmp_path):
    views = views_of(folder_of(tmp_path, convention), pose=convention)
    torch.testing.assert_close(views.camera, CAMERAS, atol=1e-5, rtol=0)
    torch.testing.assert_close(angles_of(views.camera), torch.tensor(ANGLES), atol=1e-5, rtol=0)
    assert views.label.tolist() == [0, 1, 0, 1]
    assert views.classes == ("a", "b")
    assert torch.equal(views.image, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


def test_an_archive_of_images_and_one_with_a_grid_are_read(tmp_path):
    np.savez(tmp_path / "list.npz", image=PIXELS, pose=np.array(ANGLES), label=np.array([0, 1, 1, 0]))
    listed = views_of(tmp_path / "list.npz")
    torch.testing.assert_close(listed.camera, CAMERAS, atol=1e-5, rtol=0)
    grid = PIXELS.reshape(1, 2, 2, 8, 8, 3)
    np.savez(tmp_path / "grid.npz", image=grid, elevation_v=np.array([0.5, 0.2]), class_name=np.array(["cup"]))
    views = views_of(tmp_path / "grid.npz")
    expected = torch.tensor([(0.0, 0.5), (0.5, 0.5), (0.0, 0.2), (0.5, 0.2)])
    torch.testing.assert_close(angles_of(views.camera), expected, atol=1e-6, rtol=0)
    assert views.classes == ("cup",)
    assert listed.digest != views.digest


def test_transparent_images_are_white_and_levels_of_16_bits_are_scaled(tmp_path):
    folder_of(tmp_path)
    Image.new("RGBA", (8, 8), (200, 10, 10, 0)).save(tmp_path / "1.png")
    Image.fromarray(np.full((8, 8), 32768, dtype=np.uint16)).save(tmp_path / "2.png")
    image = views_of(tmp_path).image
    assert (image[1] == 255).all()
    assert ((image[2] == 127) | (image[2] == 128)).all()


def resized(path, size):
    Image.new("RGB", size).save(folder_of(path) / "2.png")


def truncated(path):
    file = folder_of(path) / "2.png"
    file.write_bytes(file.read_bytes()[:60])


def without_table(path):
    (folder_of(path) / "poses.csv").unlink()


WRONG_FOLDERS = {
    "another size": (lambda path: resized(path, (9, 9)), "2.png is 9 x 9: make all images 8 x 8"),
    "not square": (lambda path: resized(path, (8, 9)), "2.png is 8 x 9: make all images square"),
    "truncated": (truncated, "2.png cannot be read as an image"),
    "no image": (lambda path: (folder_of(path) / "2.png").unlink(), "2.png is missing; add it"),
    "no table": (without_table, "poses.csv cannot be read as a table of poses"),
    "no pose": (lambda path: folder_of(path, u=""), "poses.csv, line 4: 'u' of 2.png is not a number: ''"),
    "no number": (lambda path: folder_of(path, v="high"), "poses.csv, line 4: 'v' of 2.png is not a number: 'high'"),
    "infinite": (lambda path: folder_of(path, v="inf"), "poses.csv, line 4: 'v' of 2.png is not a number: 'inf'"),
    "another convention": (lambda path: folder_of(path, "opengl"), "poses.csv has no column 'u'; data.pose: angles"),
    "an empty table": (lambda path: (folder_of(path) / "poses.csv").write_text("file,u,v\n"), "has no row"),
}


@pytest.mark.parametrize("name", WRONG_FOLDERS)
def test_what_a_folder_lacks_is_one_line(name, tmp_path):
    make, text = WRONG_FOLDERS[name]
    make(tmp_path)
    with pytest.raises(UsageError) as caught:
        views_of(tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG_ARCHIVES = {
    "no image": ({"pose": np.zeros((4, 2))}, "needs 'image' in bytes [N, H, W, 3]; it has pose float64 [4, 2]"),
    "floats": ({"image": PIXELS / 255}, "needs 'image' in bytes"),
    "grey": ({"image": PIXELS[..., :1]}, "needs 'image' in bytes"),
    "not square": ({"image": PIXELS[:, :4], "pose": np.zeros((4, 2))}, "images of 4 x 8: make them square"),
    "no pose": ({"image": PIXELS}, "'pose' is missing; it should be [4, 2]"),
    "fewer poses": ({"image": PIXELS, "pose": np.zeros((3, 2))}, "'pose' is [3, 2]; it should be [4, 2]"),
    "matrices": ({"image": PIXELS, "pose": np.zeros((4, 12))}, "'pose' is [4, 12]; it should be [4, 2]"),
}


@pytest.mark.parametrize("name", WRONG_ARCHIVES)
def test_what_an_archive_lacks_is_one_line(name, tmp_path):
    arrays, text = WRONG_ARCHIVES[name]
    np.savez(tmp_path / "views.npz", **arrays)
    with pytest.raises(UsageError) as caught:
        views_of(tmp_path / "views.npz")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x93NUMPY", b"text"])
def test_what_is_no_archive_is_one_line(content, tmp_path):
    (tmp_path / "views.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"is no \.npz with arrays"):
        views_of(tmp_path / "views.npz")


def test_a_missing_file_is_said_with_what_to_do():
    with pytest.raises(UsageError, match=r"runner data get views.npz.*data.synthetic=true"):
        read(PosedViewsConfig(root="nowhere"))


def test_synthetic_views_are_called_so_and_differ_by_class_and_azimuth():
    views = read(PosedViewsConfig(synthetic=True))
    assert all("synthetic" in name for name in views.classes)
    assert views.digest == "synthetic boxes"
    images = views.image.float().reshape(3, 4, 24, -1)
    assert (images[0] - images[1]).abs().mean() > 5
    assert (images[:, :, 0] - images[:, :, 6]).abs().mean() > 2
    # An object is there, and white around it.
    assert 0.03 < (views.image.amin(1) < 200).float().mean() < 0.6


def test_the_lens_follows_the_field_of_view():
    assert lens_of(PosedViewsConfig(field_of_view=90.0, optical_axis=(0.1, -0.2))).tolist() == pytest.approx(
        [1, 1, 0.1, -0.2]
    )


GRID_PIXELS = np.random.default_rng(0).integers(0, 256, (2, 2, 6, 16, 16, 3), dtype=np.uint8)
GRID_V = (0.4, 0.3)


def write_grid_of_views(form, path):
    """Writes the same views in one of the forms that the source reads; returns the setting."""
    images = GRID_PIXELS.reshape(-1, 16, 16, 3)
    pose = [(u / 6, v) for _ in range(2) for v in GRID_V for u in range(6)]
    label = np.repeat([0, 1], 12)
    if form == "grid":
        np.savez(path / "views.npz", image=GRID_PIXELS, elevation_v=np.array(GRID_V))
    elif form == "list":
        np.savez(path / "views.npz", image=images, pose=np.array(pose), label=label)
    else:
        lines = ["file,label,u,v"]
        for number, (pixels, (u, v)) in enumerate(zip(images, pose, strict=True)):
            Image.fromarray(pixels).save(path / f"{number}.png")
            lines.append(f"{number}.png,{label[number]},{u!r},{v!r}")
        (path / "poses.csv").write_text("\n".join(lines))
        return f"data.folder={path}"
    return f"data.file={path / 'views.npz'}"


@pytest.mark.parametrize("form", ["grid", "list", "folder"])
def test_views_are_trained_and_evaluated_in_float64_too(form, tmp_path):
    """A comparison of stages computes in float64, with data of every form."""
    recipe = tiny("graf", "data.synthetic=false", write_grid_of_views(form, tmp_path), "data.held_out=2")
    single = assemble(recipe)
    torch.set_default_dtype(torch.float64)
    try:
        double = assemble(recipe)
        Step(double)()
        metrics = double.source.evaluate(double.learner)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(math.isfinite(value) for value in metrics.values())
    single_camera, double_camera = (pipeline.source.train.tensors["camera"] for pipeline in (single, double))
    assert double_camera.dtype is torch.float64
    torch.testing.assert_close(single_camera.double(), double_camera, rtol=0, atol=1e-6)
