"""HDF5 files of samples, whole and damaged."""

import h5py
import numpy as np

SAMPLES = 48
CHUNK = 5


def images(path, count=SAMPLES, **changes):
    """Writes bright images of class 0 and dark ones of class 1 in compressed chunks, and returns the path."""
    generator = np.random.default_rng(0)
    label = np.arange(count) % 2
    image = (
        generator.integers(0, 50, (count, 3, 8, 8), dtype=np.uint8)
        + (200 * (1 - label)).astype(np.uint8)[:, None, None, None]
    )
    arrays = {"image": image, "label": label} | changes
    # HDF5 refuses to write to a file that the process still has open.
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        for name, values in arrays.items():
            add_array(file, name, values)
    partial.replace(path)
    return path


def add_array(file, name, values, compression="gzip"):
    values = np.asarray(values)
    chunks = (CHUNK, *values.shape[1:]) if values.ndim and len(values) >= CHUNK else None
    file.create_dataset(name, data=values, chunks=chunks, compression=compression if chunks else None)


def damage(path, name, row):
    """Overwrites the middle of the compressed chunk with a row of an array."""
    with h5py.File(path) as file:
        array = file[name]
        chunk = array.id.get_chunk_info_by_coord((row, *(0 for _ in array.shape[1:])))
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(b"\xff" * min(16, chunk.size // 2))
