"""Figures, images, texts and tables that a run keeps next to its metrics."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.plugin.progress import Progress
from runner.system.errors import RunnerError
from runner.system.files import make_folder, replacing

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "media"
"""Folder of a run with what was logged, by name."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


class MediaLog:
    """Writes files named by the progress of the training, from where they reach MLflow.

    Args:
        folder: Folder of the run.
        progress: Names the files: ``media/<name>/<progress>.png``.
        keep: Is called with every file that was written.
    """

    def __init__(
        self, folder: Path, progress: Progress, keep: Callable[[Path], None]
    ) -> None:
        self._folder = folder / FOLDER
        self._progress = progress
        self._keep = keep

    def write(self, name: str, ending: str, write: Callable[[Path], object]) -> None:
        """Writes a file; a later one of the same name and progress replaces it.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``.``; ``/`` separates folders.
            ending: Ending of the file, such as ``.png``.
            write: Writes the file to a path.

        Raises:
            RunnerError: The name is not allowed.
        """
        if not _NAME.fullmatch(name):
            raise RunnerError(
                f"media: {name!r:.80} is no name: use letters, digits, '_', '-', '.' and '/'"
            )
        folder = self._folder / name
        make_folder(folder)
        path = folder / f"{self._progress.position:012d}{ending}"
        with replacing(path) as partial:
            # Writers of pictures choose the format by the ending.
            with_ending = partial.with_name(partial.name + ending)
            try:
                write(with_ending)
                with_ending.rename(partial)
            finally:
                # A writer that fails half-way leaves nothing behind.
                with_ending.unlink(missing_ok=True)
        self._keep(path)


def write_image(image: Any, path: Path) -> None:
    """Writes a picture as PNG.

    Args:
        image: Array or tensor of shape (height, width), or with 1, 3 or 4 channels before or after
            these; floating-point numbers are from 0 to 1, integers from 0 to 255.
        path: The file.

    Raises:
        RunnerError: It has another shape, or pillow is missing.
    """
    import torch

    try:
        from PIL import Image
    except ImportError:
        message = "log_image needs pillow: pip install 'proven-runner[vision]'"
        raise RunnerError(message) from None
    tensor = torch.as_tensor(image).detach().cpu()
    pixels = _channels_last(tensor)
    # A network's output may be slightly outside of its range, and NaN has no colour.
    if pixels.is_floating_point():
        pixels = (pixels.nan_to_num().clamp(0, 1) * 255).round()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(path)


def _channels_last(image: Tensor) -> Tensor:
    """Returns the picture with its channels last, without one that is alone."""
    channels = (1, 3, 4)
    if image.dim() == 2:
        return image
    if image.dim() == 3 and image.shape[0] in channels:
        image = image.movedim(0, -1)
    if image.dim() == 3 and image.shape[-1] in channels:
        return image[..., 0] if image.shape[-1] == 1 else image
    raise RunnerError(
        f"log_image: a picture has the shape (height, width), or 1, 3 or 4 channels in addition; "
        f"got {list(image.shape)}"
    )


def write_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], path: Path
) -> None:
    """Writes a table as CSV, the names of its columns first."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
