"""Images in the arrays of one file, read at each access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.api import (
    Batch,
    ChunkedDataset,
    DatasetSource,
    Hdf5Dataset,
    Learner,
    UsageError,
    ZarrDataset,
)

from .sample_grid import COLUMNS, draw_sample_grid

if TYPE_CHECKING:
    from .stored_config import Hdf5ImagesConfig, StoredImagesConfig, ZarrImagesConfig

WHITE = {
    "bool": 1,
    "uint8": 255,
    "uint16": 65_535,
    "float16": 1,
    "float32": 1,
    "float64": 1,
}
"""Value of a white pixel by the type of the array."""
MOST_CLASSES = 2**16
_SETTINGS = {"image": "data.image", "label": "data.label"}


class StoredImages(DatasetSource):
    """Source of images and labels in two arrays of a file."""

    reader: ClassVar[type[ChunkedDataset]]
    """The dataset of the file's format."""

    def datasets(self, config: Hdf5ImagesConfig | ZarrImagesConfig) -> tuple[Any, Any]:
        """Returns the training and the held-out images.

        Raises:
            UsageError: The package of the format is not installed, or there are no labelled images.
        """
        # Each kind of settings has another type of path.
        settings: Any = config
        path = settings.locate(settings.file)
        if path is None:
            raise UsageError(f"data.file: {settings.nowhere(settings.file)}")
        arrays = {"image": config.image, "label": config.label}
        samples = self.reader(path, arrays, array_settings=_SETTINGS)
        self._white = _white(samples, config)
        labels = _labels(samples, config)
        samples.close()

        is_held_out = held_out_rows(len(labels), config.held_out)
        _check_parts(labels, is_held_out, config.held_out)
        self.sizes = {"classes": int(labels.max()) + 1}
        self._path = path
        self._channels_last = config.channels_last
        parts = [
            self.reader(
                path,
                arrays,
                rows,
                targets=labels[torch.from_numpy(rows)],
                array_settings=_SETTINGS,
            )
            for rows in (np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out))
        ]
        return parts[0], parts[1]

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> Batch:
        """Returns images [B, C, H, W] in [0, 1] and labels [B]."""
        batch = super().collate(samples)
        image = batch["image"]
        if image.dim() == 3:
            image = image[:, None]
        elif self._channels_last:
            image = image.permute(0, 3, 1, 2).contiguous()
        image = image.float()
        if self._white != 1:
            image = image / self._white
        return {"image": image, "label": batch["label"].long()}

    def show_data(self, learner: Learner, canvas: Any) -> None:
        """Draws training images of each class."""
        train: ChunkedDataset = self.train
        labels = self.labels()
        assert labels is not None
        drawn = {}
        for label in range(self.sizes["classes"]):
            numbers = (labels == label).nonzero().flatten().tolist()
            images: list[Tensor] = []
            if numbers:
                batch = self.collate([train[number] for number in numbers[:COLUMNS]])
                images = list(batch["image"])
            drawn[str(label)] = len(numbers), images
        size = " x ".join(map(str, self.shapes["image"][1:]))
        title = (
            f"{self._path.name}: {len(train):,} training images of {size} pixels, "
            f"{len(self.held_out):,} held out"
        )
        draw_sample_grid(drawn, title, canvas)


class Hdf5Images(StoredImages):
    """Images in an HDF5 file."""

    reader = Hdf5Dataset


class ZarrImages(StoredImages):
    """Images in a Zarr group."""

    reader = ZarrDataset


def held_out_rows(count: int, share: float) -> NDArray[np.bool_]:
    """Returns which of the first rows are held out, [count], by their numbers alone."""
    # The output function of SplitMix64 (Steele et al. 2014), which scatters consecutive numbers.
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    is_held_out: NDArray[np.bool_] = mixed / 2.0**64 < share
    return is_held_out


def _white(samples: ChunkedDataset, config: StoredImagesConfig) -> int:
    """Returns the value of a white pixel.

    Raises:
        UsageError: The array does not contain images.
    """
    size = samples.sizes["image"]
    kind = np.dtype(samples.dtypes["image"]).name
    array = f"data.image: '{config.image}' in {samples.file}"
    if len(size) not in (2, 3):
        shape = ", ".join(["N", *map(str, size)])
        expected = "[N, C, H, W], or [N, H, W] for one grey channel"
        raise UsageError(f"{array} is [{shape}], and should be {expected}")
    if len(size) == 3 and size[0] > 16 and size[2] <= 4 and not config.channels_last:
        raise UsageError(
            f"{array} has {size[0]} channels; if they are the last dimension, set "
            "data.channels_last: true"
        )
    if kind not in WHITE:
        supported = ", ".join(WHITE)
        raise UsageError(f"{array} is of type {kind}; images are one of {supported}")
    return WHITE[kind]


def _labels(samples: ChunkedDataset, config: StoredImagesConfig) -> Tensor:
    """Returns the label of every row, [N].

    Raises:
        UsageError: They are no numbers of classes.
    """
    array = f"data.label: '{config.label}' in {samples.file}"
    kind = samples.dtypes["label"]
    if samples.sizes["label"] or np.dtype(kind).kind not in "iu":
        shape = ", ".join(["N", *map(str, samples.sizes["label"])])
        raise UsageError(
            f"{array} is [{shape}] of type {kind}; labels are whole numbers, [N]"
        )
    if not len(samples):
        raise UsageError(f"{array} has no row")
    labels = samples.column("label").long()
    outside = ((labels < 0) | (labels >= MOST_CLASSES)).nonzero().flatten().tolist()
    if outside:
        value = int(labels[outside[0]])
        raise UsageError(
            f"{array}: row {outside[0]} is {value}; classes are numbers from 0 to "
            f"{MOST_CLASSES - 1:,}"
        )
    return labels


def _check_parts(labels: Tensor, is_held_out: NDArray[np.bool_], share: float) -> None:
    """Raises a UsageError if nothing is held out, or a class is never trained on."""
    if not is_held_out.any():
        problem = f"none of the {len(labels):,} images is held out"
        raise UsageError(f"data.held_out: {share:g}: {problem}; raise it")
    held_out = torch.from_numpy(is_held_out)
    counts = torch.bincount(labels)
    trained = torch.bincount(labels[~held_out], minlength=len(counts))
    missing = ((counts > 0) & (trained == 0)).nonzero().flatten().tolist()
    if missing:
        problem = f"all images of class {missing[0]} are held out"
        raise UsageError(
            f"data.held_out: {share:g}: {problem}, so it would never be trained on; lower it"
        )
