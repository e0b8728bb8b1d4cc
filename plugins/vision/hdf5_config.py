"""Settings of images in an HDF5 file."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from runner.api import DataName, FileDatasetConfig


class Hdf5ImagesConfig(FileDatasetConfig):
    """Images and their classes in two arrays of one HDF5 file, which may be larger than memory.

    The arrays may be in chunks and compressed. Images have one size: [N, C, H, W], or [N, H, W] for
    one grey channel. Bytes are divided by 255 and unsigned 16-bit numbers by 65,535; fractions
    should range from 0 to 1. Labels [N] are whole numbers from 0. Which images are held out follows
    from their row numbers alone: rows may be appended, and none changes sides.
    """

    kind: ClassVar[str] = "hdf5_images"
    implementation = ".hdf5_images:Hdf5Images"
    provides: ClassVar[str] = "labelled_images"

    file: DataName
    """A path, relative to the recipe; or the name of a file in the folders of data."""
    image: str = "image"
    """Path of the array with images in the file."""
    label: str = "label"
    """Path of the array with the number of each image's class."""
    channels_last: bool = False
    """Whether images are [N, H, W, C]."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the images that only evaluation sees, about."""
