"""Images in folders, decoded at each access."""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.api import Batch, DatasetSource, Learner, UsageError, fingerprint_of_files

from .config import EXTRA
from .sample_grid import COLUMNS, draw_sample_grid

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    from .config import ImageFolderConfig

_log = logging.getLogger(__name__)
SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
)


class Images(Dataset[tuple[Tensor, int]]):
    """Files with their labels; an item is decoded and scaled."""

    def __init__(
        self, files: Sequence[tuple[Path, int]], side: int, grey: bool
    ) -> None:
        self.files = list(files)
        self.targets = [label for _, label in self.files]
        self.side = side
        self.grey = grey

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns the image [C, side, side] in bytes, and its label."""
        from PIL import Image

        path, label = self.files[index]
        try:
            with Image.open(path) as opened:
                pixels = decode(opened, self.side, self.grey)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            problem = (
                f"{printable(path)} cannot be read as an image: {printable(error)}"
            )
            raise UsageError(f"data.folder: {problem}; remove or repair it") from error
        return torch.from_numpy(pixels).permute(2, 0, 1), label


def decode(image: PillowImage, side: int, grey: bool) -> np.ndarray:
    """Converts an image to what a viewer shows of it, in bytes [side, side, channels].

    EXIF orientation is applied. What is transparent is white. Grey levels of 16 bits are divided
    by 65,535, and floats range from 0 to 1; 32-bit integers are read as 16-bit levels, which many
    programs store in them. Of several frames, the first counts. Colour profiles are ignored.

    Raises:
        ValueError: The levels exceed these ranges, or Pillow cannot convert the image.
    """
    from PIL import Image, ImageOps

    with suppress(struct.error, SyntaxError, KeyError, TypeError, ValueError):
        # A viewer shows images with damaged EXIF data as they are.
        ImageOps.exif_transpose(image, in_place=True)
    size = side, side
    if image.mode == "F" or image.mode.startswith("I"):
        # Pillow clips such images when it converts them, so they are scaled as floats.
        levels = Image.fromarray(_eight_bit_levels(image))
        levels = levels.resize(size, Image.Resampling.BILINEAR)
        pixels = np.asarray(levels).round().clip(0, 255).astype(np.uint8)[..., None]
        return pixels if grey else pixels.repeat(3, axis=2)
    # Otherwise the colours below transparent pixels would become visible.
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    converted = image.convert("L" if grey else "RGB")
    scaled = converted.resize(size, Image.Resampling.BILINEAR)
    return np.array(scaled).reshape(side, side, -1)


def _eight_bit_levels(image: PillowImage) -> np.ndarray:
    """Returns the levels of an image of more than 8 bits, from 0 to 255 in float32.

    Raises:
        ValueError: A level is outside of the range.
    """
    levels = np.asarray(image).astype(np.float64)
    largest, kind = (
        (1, "floats from 0 to 1")
        if image.mode == "F"
        else (65_535, "16-bit levels from 0 to 65,535")
    )
    lowest = levels.min()
    highest = levels.max()
    # Written as a negation, which is also true for NaN.
    if not (lowest >= 0 and highest <= largest):
        raise ValueError(
            f"its values range from {lowest:,g} to {highest:,g}; convert them to {kind}"
        )
    return (levels * (255 / largest)).astype(np.float32)


def printable(value: object) -> str:
    """Returns the text of a path or an error, with escapes for bytes that are not UTF-8."""
    return (
        str(value)
        .encode("utf-8", "surrogateescape")
        .decode("utf-8", "backslashreplace")
    )


class ImageFolder(DatasetSource):
    """A source of images with one subfolder for each class."""

    def datasets(self, config: ImageFolderConfig) -> tuple[Any, Any]:
        """Returns the training and the held-out images.

        Raises:
            UsageError: Pillow is not installed, or the folder is not as it should be.
        """
        try:
            import PIL.Image  # noqa: F401 (to say at once that it is missing)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"data.kind: 'image_folder' needs the package 'pillow': {EXTRA}"
            ) from error
        folder = config.folder
        if not folder.is_dir():
            raise UsageError(f"data.folder: no such folder: {folder}")
        # File managers and version control create hidden folders.
        classes = sorted(
            path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."
        )
        if len(classes) < 2:
            raise UsageError(
                f"data.folder: {folder} should have a subfolder for each of two classes or more"
            )
        self.sizes = {"classes": len(classes)}
        train: list[tuple[Path, int]] = []
        held_out: list[tuple[Path, int]] = []
        for label, path in enumerate(classes):
            files = images_in(path)
            evaluated = [file for file in files if is_held_out(file, config.held_out)]
            trained = [file for file in files if not is_held_out(file, config.held_out)]
            _check_parts(path, trained, evaluated, config.held_out)
            train += [(file, label) for file in trained]
            held_out += [(file, label) for file in evaluated]
        if not held_out:
            raise UsageError(
                f"data.held_out: no image is held out of so few; raise it ({config.held_out:g})"
            )
        self.classes = [printable(path.name) for path in classes]
        self._paths = [file for file, _ in train + held_out]
        self._folder = folder
        side = config.side
        grey = config.grey
        return Images(train, side, grey), Images(held_out, side, grey)

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> Batch:
        """Returns images [B, C, side, side] in [0, 1] and labels [B]."""
        images, labels = zip(*samples, strict=True)
        return {
            "image": torch.stack(images).float() / 255,
            "label": torch.tensor(labels),
        }

    def fingerprint(self) -> str:
        """Returns a digest of the images' names and contents."""
        return fingerprint_of_files(self._paths, self._folder)

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws training images of each class, as they are scaled for training."""
        train: Images = self.train
        samples = {}
        for label, name in enumerate(self.classes):
            numbers = [
                number
                for number, (_, file_label) in enumerate(train.files)
                if file_label == label
            ]
            # Files of one name are often similar, so the images are spread over all.
            spread = numbers[:: max(1, len(numbers) // COLUMNS)][:COLUMNS]
            images = [train[number][0].float() / 255 for number in spread]
            samples[name] = len(numbers), images
        size = f"{train.side} x {train.side} pixels"
        title = (
            f"{self._folder.name}: {len(train):,} training images, scaled to {size}, "
            f"{len(self.held_out):,} held out"
        )
        draw_sample_grid(samples, title, canvas)


def images_in(folder: Path) -> list[Path]:
    """The images of a class, sorted by name.

    Raises:
        UsageError: There is none.
    """
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in SUFFIXES and file.name[0] != "."
    )
    if not files:
        raise UsageError(
            f"data.folder: {printable(folder)} holds no image ({', '.join(sorted(SUFFIXES))})"
        )
    return files


def is_held_out(path: Path, share: float) -> bool:
    """Returns whether an image is held out, by its class and name alone."""
    digest = hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _check_parts(
    folder: Path, trained: Sequence[Path], evaluated: Sequence[Path], share: float
) -> None:
    """Raises a UsageError if no image of a class is trained on; logs a warning if none is held
    out.
    """
    name = printable(folder.name)
    if not trained:
        problem = (
            f"all {len(evaluated):,} images of class '{name}' are held out, so it would "
            f"never be trained on"
        )
        raise UsageError(
            f"data.held_out: {share:g}: {problem}; lower it, or add images"
        )
    if not evaluated:
        _warn(
            f"data.held_out: none of the {len(trained):,} images of class '{name}' is held "
            f"out: it is not evaluated"
        )


@cache
def _warn(text: str) -> None:
    """Logs a warning once, although a process may build many pipelines to compare them."""
    _log.warning(text)
