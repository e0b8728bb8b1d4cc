"""Images with poses from an archive, from a folder, or from synthetic boxes."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runner.api import UsageError

from .archive import (
    array_of,
    class_names_of,
    images_of,
    labels_of,
    load_arrays,
    one_line,
)
from .camera import camera_from_angles
from .pose_table import TABLE, PoseRow, read_images, read_rows
from .poses import COLUMNS, cameras_of
from .synthetic import BOXES, render_boxes

if TYPE_CHECKING:
    from .config import PosedViewsConfig

SYNTHETIC = "synthetic boxes"


@dataclass(frozen=True)
class Views:
    """N images with their cameras."""

    image: Tensor
    """[N, 3, side, side], bytes."""
    label: Tensor
    """[N]."""
    camera: Tensor
    """[N, 3, 4], in axes of OpenGL."""
    classes: tuple[str, ...]
    """Names of the labels."""
    digest: str
    """SHA-256 of the files."""


def read(config: PosedViewsConfig) -> Views:
    """Reads the views that the settings name.

    Raises:
        UsageError: The files are missing or wrong.
    """
    if config.synthetic:
        return synthetic_views(config.radius, tuple(lens_of(config).tolist()))
    if config.folder is not None:
        return read_folder(config.folder, config)
    return read_archive(config.require(config.file), config)


def archive_size(path: Path) -> tuple[int, int, int] | None:
    """Returns the number, side and classes of the images of an archive.

    Pixels are not read.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            labels = len(arrays["class_name"]) if "class_name" in names else None
            if labels is None and "label" in names:
                labels = int(arrays["label"].max()) + 1
        with zipfile.ZipFile(path) as archive, archive.open("image.npy") as file:
            version = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read_header = np.lib.format.read_array_header_2_0
            shape, _, _ = read_header(file)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    if len(shape) not in (4, 6):
        return None
    count = int(np.prod(shape[:-3]))
    return count, shape[-2], labels or 1


def read_archive(path: Path, config: PosedViewsConfig) -> Views:
    """Reads an ``.npz`` with listed images and poses, or with all azimuths of some elevations of
    every class.

    Raises:
        UsageError: The file cannot be read, or has no images with poses.
    """
    arrays = load_arrays(path)
    image = images_of(path, arrays)
    if image.ndim == 6:
        label, camera = _grid_cameras(path, arrays, config)
    else:
        label = torch.from_numpy(labels_of(path, arrays, len(image)))
        columns = len(COLUMNS[config.pose])
        poses = array_of(path, arrays, "pose", (len(image), columns))
        location = partial(_row_of_array, path)
        camera = cameras_of(_numbers(poses), config, location)
    classes = class_names_of(path, arrays, int(label.max()) + 1)
    pixels = (
        torch.from_numpy(image)
        .reshape(-1, *image.shape[-3:])
        .permute(0, 3, 1, 2)
        .contiguous()
    )
    return Views(pixels, label, camera, classes, digest_of([path]))


def _row_of_array(path: Path, number: int) -> str:
    return f"data.file: {one_line(path)}: row {number} of 'pose'"


def _grid_cameras(
    path: Path, arrays: dict[str, np.ndarray], config: PosedViewsConfig
) -> tuple[Tensor, Tensor]:
    """Returns labels [N] and cameras [N, 3, 4] of images [classes, elevations, azimuths, ...]."""
    classes, elevations, azimuths = arrays["image"].shape[:3]
    v = _numbers(array_of(path, arrays, "elevation_v", (elevations,)))
    if ((v < 0) | (v > 1)).any():
        problem = (
            f"'elevation_v' is {v.tolist()}; it should be from 0 to 1, "
            "(1 - sin(elevation)) / 2"
        )
        raise UsageError(f"data.file: {one_line(path)}: {problem}")
    u = torch.arange(azimuths) / azimuths
    views_of_class = torch.cartesian_prod(v, u).view(-1, 2)
    angles = views_of_class.flip(1).repeat(classes, 1)
    label = torch.arange(classes).repeat_interleave(len(views_of_class))
    return label, camera_from_angles(angles, config.radius)


def _numbers(array: np.ndarray) -> Tensor:
    """Returns an array in the default type: that of the model, or float64 in a comparison."""
    return torch.from_numpy(array).to(torch.get_default_dtype())


def read_folder(folder: Path, config: PosedViewsConfig) -> Views:
    """Reads images and their pose table.

    Raises:
        UsageError: An image or a pose is missing or wrong.
    """
    rows = read_rows(folder, config)
    images = read_images(folder, rows)
    classes = sorted({row.label for row in rows})
    label = torch.tensor([classes.index(row.label) for row in rows])
    poses = torch.tensor([row.pose for row in rows])
    camera = cameras_of(poses, config, partial(_row_of_table, folder, rows))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    paths = [folder / TABLE, *(folder / row.file for row in rows)]
    return Views(pixels, label, camera, tuple(classes), digest_of(paths))


def _row_of_table(folder: Path, rows: Sequence[PoseRow], number: int) -> str:
    row = rows[number]
    return f"data.folder: {one_line(folder / TABLE)}, line {row.line}, {one_line(row.file)}"


def synthetic_views(radius: float, lens: tuple[float, ...]) -> Views:
    """Returns views of synthetic boxes, which are named as such."""
    pixels, label, camera = render_boxes(radius, lens)
    return Views(pixels, label, camera, tuple(BOXES), SYNTHETIC)


def lens_of(config: PosedViewsConfig) -> Tensor:
    """Returns focal lengths and optical axis [4] in units of half an image."""
    focal = 1 / float(np.tan(np.deg2rad(config.field_of_view) / 2))
    return torch.tensor([focal, focal, *config.optical_axis])


def digest_of(paths: Sequence[Path]) -> str:
    """Returns the SHA-256 of the contents of files."""
    contents = hashlib.sha256()
    for path in paths:
        contents.update(path.read_bytes())
    return contents.hexdigest()
