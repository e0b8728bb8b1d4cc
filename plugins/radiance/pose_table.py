"""Images in a folder and the table of their poses."""

from __future__ import annotations

import csv
import logging
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from runner.api import UsageError

from ..vision.image_folder import SUFFIXES, decode
from .archive import one_line
from .poses import COLUMNS

if TYPE_CHECKING:
    from .config import PosedViewsConfig

TABLE = "poses.csv"
FIRST_LINE = 2
"""Line of the first row, after the names of the columns."""
_log = logging.getLogger(__name__)


class PoseRow(NamedTuple):
    """Row of a pose table."""

    line: int
    file: str
    label: str
    pose: list[float]


def read_rows(folder: Path, config: PosedViewsConfig) -> list[PoseRow]:
    """Reads the table of poses, and checks that it fits the images of the folder.

    Raises:
        UsageError: The table cannot be read, a row is incomplete, or an image and its row do not
            belong together.
    """
    if not folder.is_dir():
        raise UsageError(f"data.folder: no such folder: {one_line(folder)}")
    path = folder / TABLE
    cells = _read_cells(path, config)
    rows = [
        _row(path, number, cell, config)
        for number, cell in enumerate(cells, start=FIRST_LINE)
    ]
    _check_files(folder, rows)
    return rows


def _read_cells(path: Path, config: PosedViewsConfig) -> list[dict[str, str | None]]:
    """Reads all rows of the table by column."""
    columns = COLUMNS[config.pose]
    try:
        # Spreadsheets write a byte order mark, which is not a part of the first name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or ()
            cells = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"data.folder: {one_line(path)} cannot be read as a table of poses: {one_line(error)}"
        ) from error
    missing = [name for name in ("file", *columns) if name not in names]
    if missing:
        raise UsageError(
            f"data.folder: {one_line(path)} has no column '{missing[0]}'; "
            f"data.pose: {config.pose} needs the columns file, {', '.join(columns)}, "
            "separated by commas"
        )
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise UsageError(
            f"data.folder: {one_line(path)} has the column '{one_line(repeated[0])}' twice; "
            "remove one"
        )
    if not cells:
        raise UsageError(
            f"data.folder: {one_line(path)} has no row; add one for each image"
        )
    return cells


def _row(
    path: Path, line: int, cells: dict[str, str | None], config: PosedViewsConfig
) -> PoseRow:
    """Returns a checked row."""
    location = f"data.folder: {one_line(path)}, line {line}"
    # DictReader collects surplus cells under None.
    if None in cells:
        raise UsageError(
            f"{location} has more cells than the table has columns; remove the surplus"
        )
    file = cells["file"] or ""
    if not file.strip():
        raise UsageError(f"{location} has no file; name the image, or remove the line")
    # A table from elsewhere should not make the runner read other files.
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise UsageError(
            f"{location}: '{one_line(file)}' is outside of the folder; name files relative to it"
        )
    label = cells.get("label", "")
    if "label" in cells and not (label or "").strip():
        raise UsageError(
            f"{location}: {one_line(file)} has no label; name its class, or remove the column"
        )
    pose = []
    for name in COLUMNS[config.pose]:
        number = _number(cells[name])
        if number is None:
            text = one_line(repr(cells[name] or ""))
            raise UsageError(
                f"{location}: '{name}' of {one_line(file)} is not a number: {text}; write its pose"
            )
        pose.append(number)
    return PoseRow(line, file, one_line(label or ""), pose)


def _number(text: str | None) -> float | None:
    """Returns a finite number, or None if the text is something else."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _check_files(folder: Path, rows: Sequence[PoseRow]) -> None:
    """Raises a UsageError unless each image has exactly one row, and each row an image."""
    # The first line in which an image is named.
    lines: dict[Path, int] = {}
    for row in rows:
        path = folder / row.file
        location = f"data.folder: {one_line(folder / TABLE)}, line {row.line}"
        if path in lines:
            hint = "an image has one pose, so remove one of them"
            raise UsageError(
                f"{location}: {one_line(row.file)} is already in line {lines[path]}; {hint}"
            )
        if not path.is_file():
            raise UsageError(
                f"{location}: image {one_line(path)} is missing; add it, or remove the line"
            )
        lines[path] = row.line
    images = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES and path.name[0] != "."
    ]
    without_pose = [path for path in images if path not in lines]
    if without_pose:
        hint = f"add it to {TABLE}, or move it elsewhere"
        if len(without_pose) > 1:
            hint += f"; {len(without_pose) - 1} more images have none"
        raise UsageError(
            f"data.folder: {one_line(without_pose[0])} has no pose: {hint}"
        )


def read_images(folder: Path, rows: Sequence[PoseRow]) -> np.ndarray:
    """Reads the images of rows, in bytes [N, side, side, 3].

    Transparency is blended with white and 16-bit levels are scaled, with a warning that names the
    first such image.

    Raises:
        UsageError: An image cannot be read, is not square, or differs in size from the first.
    """
    from PIL import Image

    images = []
    problems: dict[str, str] = {}
    side = 0
    for row in rows:
        path = folder / row.file
        name = one_line(path)
        try:
            with Image.open(path) as image:
                width, height = image.size
                side = side or width
                if (width, height) != (side, side):
                    is_square = width == height
                    size = (
                        f"{side} x {side}, as the first one" if is_square else "square"
                    )
                    raise UsageError(
                        f"data.folder: {name} is {width} x {height}: make all images {size}"
                    )
                if image.has_transparency_data:
                    problems.setdefault(
                        "transparent, and blended with white; use a white background",
                        name,
                    )
                if image.mode.startswith(("I", "F")):
                    problems.setdefault(
                        "of more than 8 bits, and scaled to 8 bits; convert it", name
                    )
                images.append(decode(image, side, grey=False))
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            struct.error,
            Image.DecompressionBombError,
        ) as error:
            hint = "repair it, or remove it and its row"
            raise UsageError(
                f"data.folder: {name} cannot be read as an image: {one_line(error)}; {hint}"
            ) from error
    for problem, name in problems.items():
        _warn(name, problem)
    return np.stack(images)


@cache
def _warn(name: str, problem: str) -> None:
    """Logs a warning once, although a process may build many pipelines to compare them."""
    _log.warning("data.folder: %s is %s", name, problem)
