"""Pictures of objects that turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

COLUMNS = 8
GIF_MS = 90


def draw_turntable(rows: Sequence[Tensor], path: Path) -> None:
    """Writes a grid of views as ``.png``, or all views one after the other as ``.gif``.

    Args:
        rows: For each class, views [V, 3, H, W] from -1 to 1.
        path: Where to.
    """
    from PIL import Image

    pixels = [_pixels(row) for row in rows]
    if path.suffix == ".gif":
        frames = [Image.fromarray(_enlarged(np.concatenate(views, 1))) for views in zip(*pixels, strict=True)]
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=GIF_MS, loop=0)
        return
    lines = []
    for views in pixels:
        chosen = views[:: max(1, len(views) // COLUMNS)][:COLUMNS]
        lines.append(np.concatenate(list(chosen), 1))
    Image.fromarray(_enlarged(np.concatenate(lines, 0))).save(path)


def _pixels(views: Tensor) -> np.ndarray:
    """Bytes [V, H, W, 3]."""
    scaled = ((views.clamp(-1, 1) + 1) * 127.5).round().byte()
    pixels: np.ndarray = scaled.permute(0, 2, 3, 1).numpy()
    return pixels


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    return pixels.repeat(2, axis=0).repeat(2, axis=1)
