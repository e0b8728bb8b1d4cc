"""Images with poses, read from an archive or a folder, or rendered from coloured boxes."""

from __future__ import annotations

import csv
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runner.api import UsageError

from ..vision.image_folder import decode
from .camera import camera_from_angles, camera_from_direction, pixel_positions, rays, to_opengl
from .rendering import composite, lengths, stratified_depths

if TYPE_CHECKING:
    from .config import PosedViewsConfig

TABLE = "poses.csv"
COLUMNS = {
    "angles": ("u", "v"),
    "direction": ("x", "y", "z", "dx", "dy", "dz"),
    **dict.fromkeys(("opengl", "opencv"), tuple(f"m{row}{column}" for row in range(3) for column in range(4))),
}
"""Of a pose table, by ``data.pose``."""
SYNTHETIC = "synthetic boxes"
SYNTHETIC_SIDE, SYNTHETIC_AZIMUTHS, SYNTHETIC_SAMPLES = 32, 24, 64


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
    """What labels stand for, by number."""
    digest: str
    """SHA-256 of the files."""


def read(config: PosedViewsConfig) -> Views:
    """Returns the views that the settings name.

    Raises:
        UsageError: The file is missing, or holds something else.
    """
    if config.synthetic:
        return synthetic_views(config.radius, tuple(lens_of(config).tolist()))
    if config.folder is not None:
        return read_folder(config.folder, config)
    path = config.locate(config.file)
    if path is None:
        raise UsageError(f"data.file: {config.nowhere(config.file)}; data.synthetic: true renders coloured boxes")
    return read_archive(path, config)


def read_archive(path: Path, config: PosedViewsConfig) -> Views:
    """Reads an ``.npz``; a UsageError if it holds no images with poses."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            arrays = dict(kept)
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"data.file: {path} is no .npz with arrays: {error or 'it is empty'}") from error
    image = arrays.get("image")
    if image is None or image.dtype != np.uint8 or image.ndim not in (4, 6) or image.shape[-1] != 3:
        held = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in arrays.items()) or "nothing"
        raise UsageError(f"data.file: {path} needs 'image' in bytes [N, H, W, 3]; it has {held}")
    if image.shape[-2] != image.shape[-3]:
        raise UsageError(f"data.file: {path} has images of {image.shape[-3]} x {image.shape[-2]}: make them square")
    if image.ndim == 6:
        label, angles = _grid(path, arrays)
        camera = camera_from_angles(angles, config.radius)
    else:
        label = torch.from_numpy(_array(path, arrays, "label", (len(image),), np.zeros(len(image)))).long()
        poses = _array(path, arrays, "pose", (len(image), len(COLUMNS[config.pose])))
        camera = cameras(torch.from_numpy(poses).float(), config)
    classes = arrays.get("class_name", np.arange(int(label.max()) + 1)).astype(str)
    pixels = torch.from_numpy(image).reshape(-1, *image.shape[-3:]).permute(0, 3, 1, 2).contiguous()
    return Views(pixels, label, camera, tuple(classes.tolist()), _digest([path]))


def _grid(path: Path, arrays: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Labels and angles of an archive with all azimuths of some elevations of every class."""
    classes, elevations, azimuths = arrays["image"].shape[:3]
    heights = torch.from_numpy(_array(path, arrays, "elevation_v", (elevations,))).float()
    grid = torch.meshgrid(torch.arange(classes).float(), heights, torch.arange(azimuths) / azimuths, indexing="ij")
    return grid[0].flatten().long(), torch.stack([grid[2].flatten(), grid[1].flatten()], -1)


def _array(path: Path, arrays: Mapping[str, Any], name: str, shape: tuple[int, ...], default: Any = None) -> Any:
    found = arrays.get(name, default)
    if found is None or found.shape != shape:
        there = "is missing" if found is None else f"is {list(found.shape)}"
        raise UsageError(
            f"data.file: {path}: '{name}' {there}; it should be {list(shape)}, as 'image' and data.pose say"
        )
    return found


def read_folder(folder: Path, config: PosedViewsConfig) -> Views:
    """Reads images and their pose table; a UsageError if one is missing or does not fit."""
    from PIL import Image

    rows = _table(folder / TABLE, config)
    images, side = [], 0
    for row in rows:
        path = folder / row["file"]
        try:
            with Image.open(path) as opened:
                width, height = opened.size
                side = side or width
                if (width, height) != (side, side):
                    wanted = f"{side} x {side}, as the first one" if width == height else "square"
                    raise UsageError(f"data.folder: {path} is {width} x {height}: make all images {wanted}")
                images.append(decode(opened, side, grey=False))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(f"data.folder: {path} cannot be read as an image: {error}") from error
    classes = sorted({row.get("label") or "" for row in rows})
    label = torch.tensor([classes.index(row.get("label") or "") for row in rows])
    poses = torch.tensor([[float(row[name]) for name in COLUMNS[config.pose]] for row in rows])
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    paths = [folder / TABLE, *(folder / row["file"] for row in rows)]
    return Views(pixels, label, cameras(poses, config), tuple(classes), _digest(paths))


def _table(path: Path, config: PosedViewsConfig) -> list[dict[str, str]]:
    """The rows of a pose table, of which every one has a file and the numbers of a pose."""
    columns = COLUMNS[config.pose]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in ("file", *columns) if name not in (reader.fieldnames or ())]
            if missing:
                needed = f"data.pose: {config.pose} needs the columns {', '.join(columns)}"
                raise UsageError(f"data.folder: {path} has no column '{missing[0]}'; {needed}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"data.folder: {path} cannot be read as a table of poses: {error}") from error
    if not rows:
        raise UsageError(f"data.folder: {path} has no row")
    for number, row in enumerate(rows, start=2):
        for name in columns:
            if not _is_number(row[name]):
                raise UsageError(
                    f"data.folder: {path}, line {number}: '{name}' of {row['file']} is no number: {row[name]!r}"
                )
    return rows


def _is_number(text: str | None) -> bool:
    try:
        return bool(np.isfinite(float(text or "")))
    except ValueError:
        return False


def cameras(poses: Tensor, config: PosedViewsConfig) -> Tensor:
    """Returns cameras [N, 3, 4] of poses [N, columns] in the convention of the settings."""
    if config.pose == "angles":
        return camera_from_angles(poses, config.radius)
    if config.pose == "direction":
        return camera_from_direction(poses[:, :3], poses[:, 3:])
    return to_opengl(poses.view(-1, 3, 4), config.pose)


def lens_of(config: PosedViewsConfig) -> Tensor:
    """Returns focal lengths and optical axis [4] in units of half an image."""
    focal = 1 / float(np.tan(np.deg2rad(config.field_of_view) / 2))
    return torch.tensor([focal, focal, *config.optical_axis])


@cache
def synthetic_views(radius: float, lens: tuple[float, ...]) -> Views:
    """Renders three sorts of coloured boxes, each from four elevations.

    Args:
        radius: Distance of the cameras.
        lens: As ``rays`` takes it.
    """
    boxes = {
        "low": ([0.34, 0.22, 0.12], [0.85, 0.30, 0.20]),
        "tall": ([0.10, 0.20, 0.38], [0.20, 0.45, 0.85]),
        "long": ([0.10, 0.38, 0.20], [0.25, 0.65, 0.30]),
    }
    azimuth = torch.arange(SYNTHETIC_AZIMUTHS) / SYNTHETIC_AZIMUTHS
    grid = torch.meshgrid(torch.tensor([0.5, 0.4, 0.3, 0.2]), azimuth, indexing="ij")
    camera = camera_from_angles(torch.stack([grid[1].flatten(), grid[0].flatten()], -1), radius)
    positions = pixel_positions(SYNTHETIC_SIDE, SYNTHETIC_SIDE)
    images = []
    for half, colour in boxes.values():
        origin, direction = rays(camera, positions.expand(len(camera), -1, -1), torch.tensor(lens))
        middle = torch.full((*direction.shape[:2], SYNTHETIC_SAMPLES), 0.5)
        near, far = radius - 0.6, radius + 0.6
        depths = stratified_depths(near, far, middle)
        points = origin.unsqueeze(2) + direction.unsqueeze(2) * depths.unsqueeze(-1)
        inside = (points.abs() < torch.tensor(half)).all(-1)
        # Sides differ in brightness, so that a view shows from where it was taken.
        shade = 0.75 + 0.25 * points[..., :1] / half[0]
        shown = composite(40.0 * inside, shade * torch.tensor(colour), lengths(depths, near, far)).colour
        images.append(shown.transpose(1, 2).reshape(-1, 3, SYNTHETIC_SIDE, SYNTHETIC_SIDE))
    pixels = (torch.cat(images) * 255).round().clamp(0, 255).to(torch.uint8)
    label = torch.arange(len(boxes)).repeat_interleave(len(camera))
    names = tuple(f"synthetic {name} box" for name in boxes)
    return Views(pixels, label, camera.repeat(len(boxes), 1, 1), names, SYNTHETIC)


def _digest(paths: Sequence[Path]) -> str:
    contents = hashlib.sha256()
    for path in paths:
        contents.update(path.read_bytes())
    return contents.hexdigest()
