"""Figure of training images by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 8
"""Images of each class."""
LARGEST_ROWS = 12
CELL_INCHES = 0.85
LABEL_INCHES = 1.3
"""Width of the column with names and counts."""
TITLE_INCHES = 0.7
GAP_DIVISOR = 8
"""Width of an image divided by the width of the gap to the next one."""


def draw_sample_grid(
    samples: Mapping[str, tuple[int, Sequence[Tensor]]], title: str, canvas: Any
) -> None:
    """Draws a row of images for each class, with its name and the number of its images.

    Args:
        samples: By the name of a class, the number of its training images, and some images [C, H,
            W] from 0 to 1.
        title: What the data are.
        canvas: An empty matplotlib figure.
    """
    visible = list(samples.items())[:LARGEST_ROWS]
    hidden = len(samples) - len(visible)
    if hidden:
        title += f"; {hidden} more class{'es' * (hidden > 1)}"
    width = LABEL_INCHES + CELL_INCHES * COLUMNS
    canvas.set_size_inches(width, TITLE_INCHES + CELL_INCHES * len(visible))
    canvas.suptitle(title, fontsize=10)
    rows = canvas.subplots(len(visible), 1, squeeze=False)[:, 0]
    for axes, (name, (count, images)) in zip(rows, visible, strict=True):
        draw_row(f"{name}\n{count:,} image{'s' * (count != 1)}", images, axes)


def draw_row(label: str, images: Sequence[Tensor], axes: Axes) -> None:
    """Draws images [C, H, W] from 0 to 1 side by side; those with one channel are grey."""
    # Missing images are white, so that those of all classes have the same size.
    cells = [*images, *[torch.ones_like(images[0])] * (COLUMNS - len(images))]
    gap = torch.ones_like(images[0][:, :, : max(1, images[0].shape[2] // GAP_DIVISOR)])
    strip = torch.cat([image for cell in cells for image in (cell, gap)], dim=2)
    pixels = strip.expand(3, -1, -1).permute(1, 2, 0).numpy()
    axes.imshow(pixels, interpolation="nearest")
    axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
