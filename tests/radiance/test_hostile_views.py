"""Damaged, hostile and mistaken files of images with poses: each is one line with the file and the fix."""

import csv
import io
import logging
import pickle
import re
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from runner.api import UsageError
from runner.cli import main
from runner.plugins.radiance.camera import camera_from_angles
from runner.plugins.radiance.config import PosedViewsConfig
from runner.plugins.radiance.reading import COLUMNS, read

COUNT = 6
ANGLES = np.stack([np.arange(COUNT) / COUNT, np.full(COUNT, 0.4)], 1)
PIXELS = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)
MATRICES = camera_from_angles(torch.from_numpy(ANGLES).float(), 2.5).flatten(1).numpy()
ARRAYS = {"image": PIXELS, "pose": ANGLES, "label": np.arange(COUNT) % 2}


def changed(name, place, value):
    """The pose or the labels, of which one number differs."""
    array = ARRAYS[name].astype(np.float64)
    array[place] = value
    return {name: array}


def matrices_with(change):
    """Camera matrices of which the third differs."""
    matrices = MATRICES.copy().reshape(-1, 3, 4)
    matrices[2] = change(matrices[2])
    return {"pose": matrices.reshape(-1, 12)}


def scaled(matrix):
    return np.concatenate([1.2 * matrix[:, :3], matrix[:, 3:]], 1)


def sheared(matrix):
    return matrix + np.eye(3, 4) * 0.3


def mirrored(matrix):
    return matrix * np.array([-1, 1, 1, 1])


def centred(matrix):
    return matrix * np.array([1, 1, 1, 0])


GRID = {"image": PIXELS.reshape(1, 2, 3, 8, 8, 3), "elevation_v": np.array([0.5, 0.3]), "pose": None, "label": None}
DIRECTIONS = np.concatenate([MATRICES.reshape(-1, 3, 4)[:, :, 3], -MATRICES.reshape(-1, 3, 4)[:, :, 2]], 1)

# By a name: the arrays that differ, the convention of poses, and a part of the message.
ARCHIVES = {
    "no image": ({"image": None}, "angles", "needs 'image' in bytes"),
    "no pose": ({"pose": None}, "angles", "'pose' is missing; it should be [6, 2]"),
    "images in float": ({"image": PIXELS / 255}, "angles", "multiply levels from 0 to 1 by 255"),
    "images in 16 bits": ({"image": PIXELS.astype(np.uint16)}, "angles", "divide 16-bit levels by 257"),
    "images in int64": ({"image": PIXELS.astype(np.int64)}, "angles", "needs 'image' in bytes"),
    "grey images": ({"image": PIXELS[..., 0]}, "angles", "repeat grey levels"),
    "one channel": ({"image": PIXELS[..., :1]}, "angles", "repeat grey levels"),
    "alpha": ({"image": np.repeat(PIXELS, 2, -1)[..., :4]}, "angles", "blend the fourth channel, alpha, with white"),
    "channels first": ({"image": PIXELS.transpose(0, 3, 1, 2)}, "angles", "needs 'image' in bytes"),
    "one image": ({"image": PIXELS[0]}, "angles", "needs 'image' in bytes"),
    "five dimensions": ({"image": PIXELS[None]}, "angles", "needs 'image' in bytes"),
    "wide images": ({"image": PIXELS[:, :4]}, "angles", "has images of 4 x 8: make them square"),
    "no images": ({"image": PIXELS[:0], "pose": ANGLES[:0], "label": None}, "angles", "has no image"),
    "no pixels": ({"image": PIXELS[:, :0, :0]}, "angles", "has no image"),
    "text as images": ({"image": np.full((6, 8, 8, 3), "x")}, "angles", "needs 'image' in bytes"),
    "fewer poses": ({"pose": ANGLES[:4]}, "angles", "'pose' is [4, 2]; it should be [6, 2]"),
    "flat poses": ({"pose": ANGLES.ravel()}, "angles", "'pose' is [12]; it should be [6, 2]"),
    "matrices as angles": ({"pose": MATRICES}, "angles", "'pose' is [6, 12]; it should be [6, 2]"),
    "angles as matrices": ({}, "opengl", "'pose' is [6, 2]; it should be [6, 12]"),
    "angles as directions": ({}, "direction", "'pose' is [6, 2]; it should be [6, 6]"),
    "square matrices": ({"pose": MATRICES.reshape(6, 3, 4)}, "opencv", "'pose' is [6, 3, 4]; it should be [6, 12]"),
    "poses as text": ({"pose": ANGLES.astype(str)}, "angles", "'pose' has the type <U32; it should have numbers"),
    "complex poses": ({"pose": ANGLES.astype(complex)}, "angles", "'pose' has the type complex128"),
    "poses as dates": ({"pose": ANGLES.astype("M8[s]")}, "angles", "'pose' has the type datetime64[s]"),
    "NaN": (changed("pose", (2, 0), np.nan), "angles", "'pose' is nan at [2, 0]; it should be a finite number"),
    "infinite": (changed("pose", (5, 1), -np.inf), "angles", "'pose' is -inf at [5, 1]"),
    "degrees": ({"pose": ANGLES * 360}, "angles", "row 0 of 'pose': u and v should be from 0 to 1: u = azimuth / 360"),
    "negative u": (changed("pose", (3, 0), -0.1), "angles", "row 3 of 'pose': u and v should be from 0 to 1"),
    "scaled matrix": (matrices_with(scaled), "opengl", "row 2 of 'pose': R is not a rotation"),
    "sheared matrix": (matrices_with(sheared), "opencv", "row 2 of 'pose': R is not a rotation"),
    "mirrored matrix": (matrices_with(mirrored), "opengl", "row 2 of 'pose': R is not a rotation but mirrors"),
    "empty matrix": (matrices_with(np.zeros_like), "opengl", "row 2 of 'pose': R is not a rotation"),
    "camera at the origin": (matrices_with(centred), "opengl", "row 2 of 'pose': the camera is at the origin"),
    "no direction": ({"pose": DIRECTIONS * [1, 1, 1, 0, 0, 0]}, "direction", "row 0 of 'pose': the direction"),
    "position of the origin": ({"pose": DIRECTIONS * [0, 0, 0, 1, 1, 1]}, "direction", "the camera is at the origin"),
    "fewer labels": ({"label": np.zeros(3)}, "angles", "'label' is [3]; it should be [6]"),
    "negative label": (changed("label", 1, -1), "angles", "'label' should have integers of at least 0"),
    "half a label": (changed("label", 1, 0.5), "angles", "'label' should have integers of at least 0"),
    "NaN as label": (changed("label", 1, np.nan), "angles", "'label' is nan at [1]"),
    "labels as text": ({"label": np.array(list("ababab"))}, "angles", "'label' has the type <U1"),
    "a gap": ({"label": np.array([0, 0, 2, 2, 0, 2])}, "angles", "'label' has no image of class 1"),
    "a huge label": ({"label": np.array([0, 0, 0, 0, 0, 1e15])}, "angles", "'label' has no image of class 1"),
    "fewer names": ({"class_name": np.array(["a"])}, "angles", "'class_name' should name each class once: it is [1]"),
    "more names": ({"class_name": np.array(["a", "b", "c"])}, "angles", "it is [3], and should be [2]"),
    "one name twice": ({"class_name": np.array(["a", "a"])}, "angles", "'class_name' has a name twice: a, a"),
    "no elevation": ({**GRID, "elevation_v": None}, "angles", "'elevation_v' is missing; it should be [2]"),
    "fewer elevations": ({**GRID, "elevation_v": np.array([0.5])}, "angles", "'elevation_v' is [1]"),
    "elevations in degrees": ({**GRID, "elevation_v": np.array([0, 24.0])}, "angles", "it should be from 0 to 1"),
    "NaN as elevation": ({**GRID, "elevation_v": np.array([np.nan, 0.5])}, "angles", "'elevation_v' is nan at [0]"),
    "objects": ({"pose": ANGLES.astype(object)}, "angles", "without arrays of Python objects"),
    "objects as images": ({"image": PIXELS.astype(object)}, "angles", "without arrays of Python objects"),
}


def one_line_about(path, **settings):
    """The message about a file or folder that cannot be read; it is one line and names the file."""
    location = {"folder": path} if path.is_dir() else {"file": str(path)}
    with pytest.raises(UsageError) as caught:
        read(PosedViewsConfig(**location, **settings))
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    assert caught.value.exit_code == 2
    return message


def archive_with(path, arrays):
    values = {name: array for name, array in {**ARRAYS, **arrays}.items() if array is not None}
    np.savez(path, **values)
    return path


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_mistake_in_an_archive_is_one_line(name, tmp_path):
    arrays, pose, text = ARCHIVES[name]
    assert text in one_line_about(archive_with(tmp_path / "views.npz", arrays), pose=pose)


def test_the_same_archives_without_the_mistakes_are_read(tmp_path):
    assert read(PosedViewsConfig(file=str(archive_with(tmp_path / "a.npz", {})))).classes == ("0", "1")
    grid = archive_with(tmp_path / "b.npz", {**GRID, "class_name": np.array(["cup"])})
    assert read(PosedViewsConfig(file=str(grid))).classes == ("cup",)
    for convention, pose in {"opengl": MATRICES, "opencv": MATRICES, "direction": DIRECTIONS}.items():
        path = archive_with(tmp_path / f"{convention}.npz", {"pose": pose})
        assert len(read(PosedViewsConfig(file=str(path), pose=convention)).camera) == COUNT


class Exploit:
    """Raises an alarm when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_a_pickle_is_not_loaded(tmp_path):
    (tmp_path / "views.npz").write_bytes(pickle.dumps(Exploit()))
    assert "is no .npz with arrays" in one_line_about(tmp_path / "views.npz")
    array = np.empty(1, dtype=object)
    array[0] = Exploit()
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "member.npz", "w") as archive:
        archive.writestr("image.npy", content.getvalue())
    assert "without arrays of Python objects" in one_line_about(tmp_path / "member.npz")


def test_arrays_that_are_not_needed_may_be_anything(tmp_path):
    path = archive_with(tmp_path / "views.npz", {"notes": np.array([{"a": 1}], dtype=object)})
    assert len(read(PosedViewsConfig(file=str(path))).image) == COUNT


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**3, 10**3, 3)}
    )
    with zipfile.ZipFile(tmp_path / "views.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", header.getvalue() + bytes(10**6))
    content = bytearray((tmp_path / "views.npz").read_bytes())
    # The size of a member stands in its entry of the central directory, after 24 bytes.
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**32 - 2)
    (tmp_path / "bomb.npz").write_bytes(content)
    assert "views.npz" in one_line_about(tmp_path / "views.npz")
    message = one_line_about(tmp_path / "bomb.npz")
    assert re.search(r"is too large: its arrays have 4,096 MiB|is no \.npz with arrays", message)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_archive_is_one_line_or_read(seed, tmp_path):
    generator = np.random.default_rng(seed)
    path = tmp_path / "views.npz"
    (np.savez_compressed if seed % 2 else np.savez)(path, **ARRAYS)
    content = bytearray(path.read_bytes())
    if seed % 3 == 0:
        del content[int(generator.integers(len(content))) :]
    else:
        for place in generator.integers(len(content), size=1 + seed % 5):
            content[place] = generator.integers(256)
    path.write_bytes(content)
    message = ""
    try:
        views = read(PosedViewsConfig(file=str(path)))
    except UsageError as error:
        message = str(error)
    if message:
        assert "\n" not in message
        assert str(path) in message
    else:
        assert views.image.shape == (COUNT, 3, 8, 8)
        assert views.camera.isfinite().all()


@pytest.fixture
def folder(tmp_path):
    """A folder of images and a table of their poses."""
    path = tmp_path / "images"
    path.mkdir()
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(path / f"{number}.png")
    write_table(path)
    return path


def write_table(path, change=lambda rows: rows, columns=("file", "label", "u", "v")):
    """Writes the table, whose rows a function may change."""
    rows = [[f"{number}.png", "ab"[number % 2], *pose] for number, pose in enumerate(ANGLES.tolist())]
    with (path / "poses.csv").open("w", newline="") as file:
        csv.writer(file).writerows([list(columns), *change(rows)])


def with_cell(row, column, value):
    def change(rows):
        rows[row][column] = value
        return rows

    return change


TABLES = {
    "a row twice": (lambda rows: [*rows, rows[1]], "line 8: 1.png is already in line 3"),
    "no row of an image": (lambda rows: rows[:-1], "5.png has no pose: add it to poses.csv"),
    "no rows of two images": (
        lambda rows: rows[:-2],
        "4.png has no pose: add it to poses.csv, or move it elsewhere; 1 more images have none",
    ),
    "no image of a row": (lambda rows: [*rows, ["6.png", "a", 0, 0]], "6.png is missing; add it"),
    "empty file": (with_cell(0, 0, " "), "line 2 has no file"),
    "empty label": (with_cell(3, 1, ""), "line 5: 3.png has no label"),
    "missing cells": (lambda rows: [rows[0][:3], *rows[1:]], "line 2: 'v' of 0.png is not a number: ''"),
    "surplus cells": (lambda rows: [[*rows[0], 1, 2], *rows[1:]], "line 2 has more cells"),
    "text as pose": (with_cell(2, 2, "left"), "line 4: 'u' of 2.png is not a number: 'left'"),
    "NaN as pose": (with_cell(2, 3, "nan"), "line 4: 'v' of 2.png is not a number: 'nan'"),
    "infinite pose": (with_cell(2, 3, "1e999"), "line 4: 'v' of 2.png is not a number: '1e999'"),
    "comma as decimal point": (with_cell(2, 2, "0,25"), "'u' of 2.png is not a number: '0,25'"),
    "degrees": (with_cell(4, 2, 240), "line 6, 4.png: u and v should be from 0 to 1"),
    "outside of the folder": (with_cell(0, 0, "../0.png"), "line 2: '../0.png' is outside of the folder"),
    "absolute path": (with_cell(0, 0, "/etc/passwd"), "line 2: '/etc/passwd' is outside of the folder"),
    "a folder as file": (with_cell(0, 0, "."), "line 2: image "),
    "several lines in a name": (with_cell(0, 0, "a\nb.png"), "line 2: image "),
    "no rows": (lambda rows: [], "has no row"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_mistake_in_a_table_is_one_line(name, folder):
    change, text = TABLES[name]
    write_table(folder, change)
    assert text in one_line_about(folder)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (("image", "label", "u", "v"), "has no column 'file'"),
        (("file", "label", "azimuth", "v"), "has no column 'u'"),
        (("file;label;u;v", "", "", ""), "has no column 'file'; data.pose: angles needs the columns file, u, v, sep"),
        (("file", "u", "u", "v"), "has the column 'u' twice"),
    ],
)
def test_wrong_columns_are_one_line(columns, text, folder):
    write_table(folder, columns=columns)
    assert text in one_line_about(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"file,u,v\n\x00\n", b"", b"file,u,v\n" + b'"' * 200_001])
def test_what_is_no_table_is_one_line(content, folder):
    (folder / "poses.csv").write_bytes(content)
    assert "poses.csv" in one_line_about(folder)


def test_a_byte_order_mark_is_not_a_part_of_a_name(folder):
    content = (folder / "poses.csv").read_bytes()
    (folder / "poses.csv").write_bytes(b"\xef\xbb\xbf" + content)
    assert read(PosedViewsConfig(folder=folder)).classes == ("a", "b")


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"^data\.folder: no such folder: .*nowhere$"):
        read(PosedViewsConfig(folder=tmp_path / "nowhere"))


@pytest.mark.parametrize("pose", ["opengl", "opencv"])
def test_a_wrong_matrix_in_a_table_is_named_by_line_and_file(pose, folder):
    matrices = MATRICES.copy()
    matrices[3, :3] *= 2
    change = lambda rows: [[*row[:2], *matrix] for row, matrix in zip(rows, matrices.tolist(), strict=True)]  # noqa: E731
    write_table(folder, change, ("file", "label", *COLUMNS[pose]))
    message = one_line_about(folder, pose=pose)
    assert "poses.csv, line 5, 3.png: R is not a rotation" in message
    assert f"data.pose: {pose} needs a matrix [R t] from camera to world" in message


def test_images_of_other_sizes_are_one_line(folder):
    for size, text in {(9, 9): "make all images 8 x 8", (8, 9): "make all images square"}.items():
        Image.new("RGB", size).save(folder / "2.png")
        assert f"2.png is {size[0]} x {size[1]}: {text}" in one_line_about(folder)


@pytest.mark.parametrize("length", [0, 10, 33, 60, 80])
def test_a_truncated_image_is_one_line(length, folder):
    content = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(content[:length])
    assert "4.png cannot be read as an image" in one_line_about(folder)


UNUSUAL = {
    "alpha": (Image.new("RGBA", (8, 8), (200, 10, 10, 0)), 255, "is transparent, and blended with white"),
    "grey with alpha": (Image.new("LA", (8, 8), (40, 0)), 255, "is transparent, and blended with white"),
    "16 bits": (Image.fromarray(np.full((8, 8), 32768, np.uint16)), 128, "of more than 8 bits, and scaled"),
    "grey": (Image.new("L", (8, 8), 77), 77, None),
    "palette": (Image.new("P", (8, 8), 0), 0, None),
    "one bit": (Image.new("1", (8, 8), 1), 255, None),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_images_are_converted_and_a_line_reports_it(name, folder, caplog):
    image, level, text = UNUSUAL[name]
    image.save(folder / "1.png")
    with caplog.at_level(logging.WARNING):
        views = read(PosedViewsConfig(folder=folder))
    assert (views.image[1].float() - level).abs().max() <= 1
    assert [record.getMessage() for record in caplog.records] == [
        record.getMessage() for record in caplog.records if text and text in record.getMessage()
    ]
    assert len(caplog.records) == (text is not None)


def test_a_command_exits_with_2_and_one_line(tmp_path, monkeypatch, capsys):
    path = archive_with(tmp_path / "views.npz", {"pose": ANGLES * 360})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runner", "data", "show", "graf", f"data.file={path}", "-q"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    # The setting in the command follows.
    line, _ = (line for line in capsys.readouterr().err.splitlines() if "views.npz" in line)
    assert "row 0 of 'pose': u and v should be from 0 to 1" in line
    assert not (tmp_path / "graf_data.png").exists()
