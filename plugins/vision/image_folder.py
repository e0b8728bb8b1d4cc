"""Images in folders, decoded when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.api import Batch, DatasetSource, UsageError

from .config import EXTRA

if TYPE_CHECKING:
    from .config import ImageFolderConfig

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"})


class Images(Dataset[tuple[Tensor, int]]):
    """Files with their labels; an item is decoded and scaled."""

    def __init__(self, files: Sequence[tuple[Path, int]], side: int, grey: bool) -> None:
        self.files, self.side, self.mode = list(files), side, "L" if grey else "RGB"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image [C, side, side] in bytes, and its label."""
        from PIL import Image, UnidentifiedImageError

        path, label = self.files[index]
        try:
            with Image.open(path) as opened:
                image = opened.convert(self.mode).resize((self.side, self.side), Image.Resampling.BILINEAR)
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise UsageError(f"data.folder: {path} cannot be read as an image: {error}; remove or repair it") from error
        pixels = np.array(image).reshape(self.side, self.side, -1)
        return torch.from_numpy(pixels).permute(2, 0, 1), label


class ImageFolder(DatasetSource):
    """One subfolder for each class."""

    def datasets(self, config: ImageFolderConfig) -> tuple[Any, Any]:
        """The images that are trained on, and those that are held out.

        Raises:
            UsageError: Pillow is not installed, or the folder is not as it should be.
        """
        try:
            import PIL.Image  # noqa: F401 (to say at once that it is missing)
        except ModuleNotFoundError as error:
            raise UsageError(f"data.kind: 'image_folder' needs the package 'pillow': {EXTRA}") from error
        folder = Path(config.folder)
        if not folder.is_dir():
            raise UsageError(f"data.folder: no such folder: {folder}")
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        if len(classes) < 2:
            raise UsageError(f"data.folder: {folder} should have a subfolder for each of two classes or more")
        self.sizes = {"classes": len(classes)}
        parts: tuple[list[tuple[Path, int]], list[tuple[Path, int]]] = [], []
        for label, path in enumerate(classes):
            found = sorted(each for each in path.iterdir() if each.suffix.lower() in SUFFIXES and each.name[0] != ".")
            if not found:
                raise UsageError(f"data.folder: {path} holds no image ({', '.join(sorted(SUFFIXES))})")
            for each in found:
                parts[is_held_out(each, config.held_out)].append((each, label))
        for part, share in zip(parts, ("smaller", "larger"), strict=True):
            if not part:
                raise UsageError(f"data.held_out: so few images need a {share} share")
        digest = hashlib.sha256()
        for each, _ in sorted(parts[0] + parts[1]):
            digest.update(f"{each.relative_to(folder).as_posix()}\0{each.stat().st_size}\0".encode())
        self._digest = digest.hexdigest()
        side, grey = config.side, config.grey
        return Images(parts[0], side, grey), Images(parts[1], side, grey)

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> Batch:
        """Images [B, C, side, side] in [0, 1], labels [B]."""
        images, labels = zip(*samples, strict=True)
        return {"image": torch.stack(images).float() / 255, "label": torch.tensor(labels)}

    def fingerprint(self) -> str:
        """Of the files' names and sizes."""
        return self._digest


def is_held_out(path: Path, share: float) -> bool:
    """Whether an image is held out, by its class and name alone."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
