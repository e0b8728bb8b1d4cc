"""Pictures of rendered views: a GIF of turning objects, and a labelled grid as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

FRAME_MS = 90
CELL_PIXELS = 128
"""Least side of an image in a picture; smaller ones are repeated pixel by pixel."""
FONT_PIXELS = 13
TEXT_PIXELS = 24
"""Height of a line of text."""
MARGIN_PIXELS = 4


class GridSection(NamedTuple):
    """Part of a grid: a title, and rows of images below headers."""

    title: str
    headers: Sequence[str]
    """One for each column."""
    rows: Sequence[Tensor]
    """Images [columns, 3, H, W] from -1 to 1."""


def write_gif(rows: Sequence[Tensor], path: Path) -> None:
    """Writes an animation of objects side by side that turn in an endless loop.

    Args:
        rows: Views [V, 3, H, W] from -1 to 1 of each object.
        path: File to write.
    """
    from PIL import Image

    sides_by_side = torch.cat([enlarge(row) for row in rows], dim=3)
    frames = [Image.fromarray(frame) for frame in to_bytes(sides_by_side)]
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0
    )


def write_grid(sections: Sequence[GridSection], path: Path) -> None:
    """Writes sections of a grid below one another as PNG."""
    from PIL import Image

    images = [section_image(section) for section in sections]
    width = max(image.width for image in images)
    height = sum(image.height for image in images)
    picture = Image.new("RGB", (width, height), "white")
    top = 0
    for image in images:
        picture.paste(image, (0, top))
        top += image.height
    picture.save(path, format="png")


def section_image(section: GridSection) -> Any:
    """Returns a Pillow image of a section."""
    from PIL import Image, ImageDraw, ImageFont

    lines = [to_bytes(enlarge(row)) for row in section.rows]
    cell = lines[0].shape[1] + MARGIN_PIXELS
    width = cell * len(section.headers) + MARGIN_PIXELS
    header_height = TEXT_PIXELS * 2
    picture = Image.new(
        "RGB", (width, header_height + cell * len(lines) + MARGIN_PIXELS), "white"
    )

    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(FONT_PIXELS)
    draw.text((MARGIN_PIXELS, MARGIN_PIXELS), section.title, fill="black", font=font)
    for column, header in enumerate(section.headers):
        middle = MARGIN_PIXELS + cell * column + cell // 2
        draw.text(
            (middle, 1.5 * TEXT_PIXELS), header, fill="dimgray", font=font, anchor="mm"
        )
    for number, line in enumerate(lines):
        top = header_height + cell * number
        for column, pixels in enumerate(line):
            picture.paste(Image.fromarray(pixels), (MARGIN_PIXELS + cell * column, top))
    return picture


def enlarge(images: Tensor) -> Tensor:
    """Returns images [N, 3, H, W] whose pixels are repeated until they have the size of a cell."""
    factor = max(1, -(-CELL_PIXELS // images.shape[-1]))
    return interpolate(images, scale_factor=factor, mode="nearest")


def to_bytes(images: Tensor) -> np.ndarray:
    """Returns images [N, 3, H, W] from -1 to 1 as bytes [N, H, W, 3]."""
    levels = (images.clamp(-1, 1) + 1) * 127.5
    scaled = levels.round().byte().cpu()
    pixels: np.ndarray = scaled.permute(0, 2, 3, 1).numpy()
    return pixels
