"""Zarr groups of samples, whole and damaged."""

import shutil

import numpy as np
import zarr
from hdf5_files import CHUNK, SAMPLES
from zarr.storage import ZipStore


def zarr_images(path, count=SAMPLES, version=3, **changes):
    """Writes bright images of class 0 and dark ones of class 1 in compressed chunks, and returns the path."""
    generator = np.random.default_rng(0)
    label = np.arange(count) % 2
    image = (
        generator.integers(0, 50, (count, 3, 8, 8), dtype=np.uint8)
        + (200 * (1 - label)).astype(np.uint8)[:, None, None, None]
    )
    if path.is_dir():
        shutil.rmtree(path)
    store = ZipStore(path, mode="w") if path.suffix == ".zip" else str(path)
    group = zarr.open_group(store, mode="w", zarr_format=version)
    for name, values in ({"image": image, "label": label} | changes).items():
        values = np.asarray(values)
        chunks = (CHUNK, *values.shape[1:]) if values.ndim and len(values) >= CHUNK else values.shape
        array = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks)
        array[...] = values
    group.store.close()
    return path


def damage_chunk(path, name, row):
    """Overwrites the middle of the chunk with a row of an array."""
    array = zarr.open_group(str(path), mode="r")[name]
    number = str(row // CHUNK)
    chunk = path / name / "c" / "/".join([number, *"0" * (array.ndim - 1)])
    content = bytearray(chunk.read_bytes())
    content[4:] = b"\xff" * len(content[4:])
    chunk.write_bytes(bytes(content))
