"""Arrays of images with poses in an ``.npz`` file, which may be damaged or made to cause harm."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runner.api import UsageError, available_memory

ARRAYS = ("image", "label", "pose", "elevation_v", "class_name")
"""Names of the arrays that are read; others are ignored."""
MEMORY_FACTOR = 6
"""Bytes that are needed for each byte of an image: the pixels, and floats of them."""
SUFFIX = ".npy"
DAMAGES = (
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Errors of zipfile and NumPy: a file is damaged, encrypted, too large, or has Python objects."""


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an ``.npz`` file. Nothing is unpickled.

    Raises:
        UsageError: The file cannot be read, or its arrays do not fit into memory.
    """
    try:
        _check_size(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {
                name: np.asarray(archive[name])
                for name in ARRAYS
                if name in archive.files
            }
    except DAMAGES as error:
        reason = one_line(error) or "it is empty"
        hint = "write it with numpy.savez, without arrays of Python objects"
        raise UsageError(
            f"data.file: {one_line(path)} is no .npz with arrays: {reason}; {hint}"
        ) from error


def _check_size(path: Path) -> None:
    """Raises if the uncompressed arrays need more than the available memory."""
    # The directory of the archive has the sizes, so a zip bomb is never unpacked.
    with zipfile.ZipFile(path) as archive:
        members = [
            member
            for member in archive.infolist()
            if member.filename.removesuffix(SUFFIX) in ARRAYS
        ]
    size = sum(member.file_size for member in members)
    available = available_memory()
    if size * MEMORY_FACTOR > available:
        raise UsageError(
            f"data.file: {one_line(path)} is too large: its arrays have "
            f"{size / 2**20:,.0f} MiB, for which {size * MEMORY_FACTOR / 2**30:,.1f} GiB "
            f"are needed, and {available / 2**30:,.1f} GiB are available; "
            "use fewer or smaller images"
        )


def images_of(path: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the images, in bytes [N, H, W, 3] or [classes, elevations, azimuths, H, W, 3].

    Raises:
        UsageError: There are none, or they are not as they should be.
    """
    image = arrays.get("image")
    if (
        image is None
        or image.dtype != np.uint8
        or image.ndim not in (4, 6)
        or image.shape[-1] != 3
    ):
        contents = ", ".join(
            f"{name} {array.dtype} {list(array.shape)}"
            for name, array in arrays.items()
        )
        problem = f"it has {contents or 'no such array'}{_image_hint(image)}"
        raise UsageError(
            f"data.file: {one_line(path)} needs 'image' in bytes [N, H, W, 3]; {problem}"
        )
    if image.shape[-2] != image.shape[-3]:
        size = f"{image.shape[-3]} x {image.shape[-2]}"
        raise UsageError(
            f"data.file: {one_line(path)} has images of {size}: make them square"
        )
    if not image.size:
        raise UsageError(
            f"data.file: {one_line(path)} has no image: 'image' is {list(image.shape)}"
        )
    return image


def _image_hint(image: np.ndarray | None) -> str:
    """Returns how to convert an array of images, as the end of a message."""
    if image is None or image.ndim not in (3, 4, 6):
        return ""
    if image.ndim == 3 or image.shape[-1] == 1:
        return ": repeat grey levels for red, green and blue"
    if image.shape[-1] == 4:
        return ": blend the fourth channel, alpha, with white"
    if image.dtype == np.uint16:
        return ": divide 16-bit levels by 257"
    if image.dtype.kind == "f":
        return ": multiply levels from 0 to 1 by 255, and round"
    return ""


def labels_of(path: Path, arrays: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Returns the labels [N] of listed images; all are 0 if there are none.

    Raises:
        UsageError: They are not integers from 0, or a class in between has no image.
    """
    label = array_of(path, arrays, "label", (count,), np.zeros(count))
    if not np.array_equal(label, np.round(label)) or label.min() < 0:
        raise UsageError(
            f"data.file: {one_line(path)}: 'label' should have integers of at least 0, "
            "one for each image"
        )
    # A label beyond the number of images leaves a gap in any case, and may be huge.
    largest = int(min(label.max(), count))
    numbers = set(label.astype(np.int64).tolist())
    missing = sorted(set(range(largest + 1)) - numbers)
    if missing:
        hint = "number the classes without gaps"
        raise UsageError(
            f"data.file: {one_line(path)}: 'label' has no image of class {missing[0]}; {hint}"
        )
    return label.astype(np.int64)


def class_names_of(
    path: Path, arrays: Mapping[str, np.ndarray], classes: int
) -> tuple[str, ...]:
    """Returns a name for each class, which is its number if the file has no names.

    Raises:
        UsageError: There are more or fewer names than classes.
    """
    names = arrays.get("class_name", np.arange(classes))
    if names.shape != (classes,):
        shape = f"it is {list(names.shape)}, and should be {[classes]}"
        raise UsageError(
            f"data.file: {one_line(path)}: 'class_name' should name each class once: {shape}"
        )
    texts = [one_line(name) for name in names.astype(str).tolist()]
    if len(set(texts)) < classes:
        raise UsageError(
            f"data.file: {one_line(path)}: 'class_name' has a name twice: {', '.join(texts)}"
        )
    return tuple(texts)


def array_of(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    name: str,
    shape: tuple[int, ...],
    default: np.ndarray | None = None,
) -> np.ndarray:
    """Returns an array of finite numbers in float64.

    Raises:
        UsageError: It is missing, has another shape, or contains something else.
    """
    array = arrays.get(name, default)
    if array is None or array.shape != shape:
        problem = "is missing" if array is None else f"is {list(array.shape)}"
        hint = "as 'image' and data.pose require"
        raise UsageError(
            f"data.file: {one_line(path)}: '{name}' {problem}; it should be {list(shape)}, {hint}"
        )
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"data.file: {one_line(path)}: '{name}' has the type {array.dtype}; "
            "it should have numbers"
        )
    numbers = array.astype(np.float64)
    infinite = np.argwhere(~np.isfinite(numbers))
    if len(infinite):
        index = infinite[0].tolist()
        value = numbers[tuple(index)]
        raise UsageError(
            f"data.file: {one_line(path)}: '{name}' is {value} at {index}; "
            "it should be a finite number"
        )
    return numbers


def one_line(value: Any) -> str:
    """Returns the text of a path, a name or an error in one line, with bytes that are not UTF-8
    as escapes.
    """
    text = " ".join(str(value).split())
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
