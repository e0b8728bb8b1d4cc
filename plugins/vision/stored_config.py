"""Settings of images in the arrays of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import DataName, DatasetConfig, FileDatasetConfig, RecipePath


class StoredImagesConfig(DatasetConfig):
    """Settings of images and labels in two arrays."""

    provides: ClassVar[str] = "labelled_images"

    image: str = "image"
    """Path of the array with images in the file."""
    label: str = "label"
    """Path of the array with the number of each image's class."""
    channels_last: bool = False
    """Whether images are [N, H, W, C]."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the images that only evaluation sees, about."""


class Hdf5ImagesConfig(StoredImagesConfig, FileDatasetConfig):
    """Images and their classes in two arrays of one HDF5 file, which may be larger than memory.

    The arrays may be in chunks and compressed. Images have one size: [N, C, H, W], or [N, H, W] for
    one grey channel. Bytes are divided by 255 and unsigned 16-bit numbers by 65,535; fractions
    should range from 0 to 1. Labels [N] are whole numbers from 0. Which images are held out follows
    from their row numbers alone: rows may be appended, and none changes sides.
    """

    kind: ClassVar[str] = "hdf5_images"
    implementation = ".stored_images:Hdf5Images"

    file: DataName
    """A path, relative to the recipe; or the name of a file in the folders of data."""


class ZarrImagesConfig(StoredImagesConfig):
    """Images and their classes in two arrays of a Zarr group, which may be larger than memory.

    The group is a folder, or one file with the ending ``.zip``. Images, labels and what is held out
    are those of ``hdf5_images``.
    """

    kind: ClassVar[str] = "zarr_images"
    implementation = ".stored_images:ZarrImages"

    file: RecipePath
    """The folder or file of the group, relative to the recipe."""

    def locate(self, path: Path) -> Path | None:
        """Returns the path of the group; None if there is none."""
        return path if path.exists() else None

    def nowhere(self, path: Path) -> str:
        """Returns a message about a missing group."""
        return f"no such file or folder: {path}"
