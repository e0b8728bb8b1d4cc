"""Samples in the arrays of an HDF5 file."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from runner.system.errors import UsageError
from runner.system.suggestions import suggestion

EXTRA = "pip install 'proven-runner[hdf5]'"
_WIDENED = {"uint16": "int32", "uint32": "int64"}
"""Types that few operations of torch accept, and the smallest type with the same values."""
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_FRACTIONAL = frozenset({"float16", "float32", "float64", "complex64", "complex128"})
_TYPES = frozenset({"bool", "uint8"}) | _SIGNED | _FRACTIONAL
_LISTED_ARRAYS = 20
_READING = threading.RLock()
"""Held while a file is read, so that no process is forked meanwhile."""
_OPEN: weakref.WeakSet[Hdf5Dataset] = weakref.WeakSet()


class Hdf5Dataset(Dataset[dict[str, Tensor]]):
    """Samples in the arrays of an HDF5 file: a sample is one row of each array, by name.

    The file is opened at the first access in the process that reads it, and closed before that
    process forks. A batch is read with one access to each chunk, so that a compressed chunk is
    decompressed once. Whole numbers of 16 and 32 bits without a sign become int32 and int64;
    other types are unchanged.

    Args:
        file: Path of the file.
        arrays: Paths of arrays in the file by the name of the entry of a sample. All have the same
            first dimension, the samples.
        rows: Numbers of the rows that are the samples, in this order; all rows by default.
        targets: Class of each sample, for settings that balance classes.
        setting: Setting of the recipe with the file, for messages.
        array_settings: Settings with the paths of arrays, by name; ``setting`` by default.

    Attributes:
        file: Absolute path of the file, which fingerprints cover.
        sizes: Shape of a row of each array.
        dtypes: Type of each array, as it is in the file.

    Raises:
        UsageError: h5py is not installed, the file cannot be read, or an array is missing, of
            another length, or of a type that torch does not have.
    """

    def __init__(
        self,
        file: Path | str,
        arrays: Mapping[str, str],
        rows: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        targets: Tensor | None = None,
        setting: str = "data.file",
        array_settings: Mapping[str, str] | None = None,
    ) -> None:
        self.file = Path(file).absolute()
        self.arrays = dict(arrays)
        self.targets = targets
        self._setting = setting
        self._array_settings = dict(array_settings or {})
        self._handle: Any = None
        self._opened: dict[str, Any] = {}
        if not self.arrays:
            raise ValueError("name at least one array")

        with self._file() as handle:
            opened = {name: self._array(handle, name) for name in self.arrays}
            count = self._common_length(opened)
            self.sizes = {name: array.shape[1:] for name, array in opened.items()}
            self.dtypes = {name: str(array.dtype) for name, array in opened.items()}
        numbers = np.arange(count) if rows is None else np.asarray(rows, np.int64)
        outside = numbers[(numbers < 0) | (numbers >= count)]
        if len(outside):
            raise ValueError(
                f"row {outside[0]} is none of the {count:,} rows of {file}"
            )
        self.rows: NDArray[np.int64] = numbers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns the sample with this number."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the samples with these numbers, in this order."""
        rows, positions = np.unique(self.rows[list(indices)], return_inverse=True)
        with _READING:
            opened = self._arrays()
            tensors = {
                name: self._read(name, array, rows) for name, array in opened.items()
            }
        samples = []
        for position in positions.tolist():
            sample = {name: tensor[position] for name, tensor in tensors.items()}
            samples.append(sample)
        return samples

    def column(self, name: str) -> Tensor:
        """Returns an array of all samples, [N, ...], for labels and other small arrays."""
        rows, positions = np.unique(self.rows, return_inverse=True)
        with _READING:
            values = self._read(name, self._arrays()[name], rows)
        return values[torch.from_numpy(positions)]

    def close(self) -> None:
        """Closes the file in this process; the next access opens it again."""
        with _READING:
            handle = self._handle
            self._handle = None
            self._opened = {}
            _OPEN.discard(self)
            if handle is not None:
                handle.close()

    # An open file cannot be sent to a worker.
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": None, "_opened": {}}

    def _arrays(self) -> dict[str, Any]:
        """Returns the arrays of the open file."""
        if self._handle is None:
            self._handle = self._file()
            _OPEN.add(self)
            opened = {name: self._array(self._handle, name) for name in self.arrays}
            # Rows that are gone would be an error of numpy that names no file.
            if len(self.rows) and self._common_length(opened) <= self.rows.max():
                raise self._error("has fewer rows than when the training was prepared")
            self._opened = opened
        return self._opened

    def _file(self) -> Any:
        """Opens the file."""
        try:
            import h5py
        except ModuleNotFoundError as error:
            raise UsageError(
                f"data.kind: HDF5 files need the package '{error.name}': {EXTRA}"
            ) from error
        if not self.file.is_file():
            raise UsageError(f"{self._setting}: no such file: {self.file}")
        try:
            return h5py.File(self.file, "r")
        except OSError as error:
            problem = f"cannot be read as an HDF5 file ({_one_line(error)})"
            raise self._error(
                f"{problem}; it is damaged, truncated, or of another format"
            ) from error

    def _array(self, handle: Any, name: str) -> Any:
        """Returns an array of the open file, whose type and origin are checked."""
        import h5py

        path = self.arrays[name]
        array = None
        # A link to a file that is missing raises a KeyError, too.
        with suppress(KeyError):
            array = handle[path]
        if not isinstance(array, h5py.Dataset):
            problem = "is a group" if isinstance(array, h5py.Group) else "is missing"
            raise self._array_error(
                name, f"{problem}{suggestion(path, _array_paths(handle))}"
            )
        elsewhere = (
            array.is_virtual or array.external or array.file.filename != handle.filename
        )
        if elsewhere:
            reason = "its rows are in another file, whose changes would go unnoticed"
            raise self._array_error(name, f"{reason}; copy them into this one")
        if not array.shape:
            raise self._array_error(name, "has no dimension, and should have samples")
        kind = array.dtype.name
        if kind not in _TYPES and kind not in _WIDENED:
            supported = ", ".join(sorted(_TYPES | _WIDENED.keys()))
            raise self._array_error(
                name, f"is of type {array.dtype}, which is none of {supported}"
            )
        return array

    def _common_length(self, opened: Mapping[str, Any]) -> int:
        lengths = {name: len(array) for name, array in opened.items()}
        if len(set(lengths.values())) > 1:
            counts = [
                f"'{self.arrays[name]}' has {count:,}"
                for name, count in lengths.items()
            ]
            raise self._error(
                f"arrays should have one row for each sample, but {', '.join(counts)}"
            )
        return next(iter(lengths.values()))

    def _read(self, name: str, array: Any, rows: NDArray[np.int64]) -> Tensor:
        """Reads sorted rows of an array: one access for each chunk that contains some.

        Args:
            name: Name of the array.
            array: The array of the open file.
            rows: Different rows in ascending order [B].

        Returns:
            The rows [B, ...].
        """
        kind = array.dtype.name
        values = np.empty((len(rows), *array.shape[1:]), _WIDENED.get(kind, kind))
        # A list of rows is one call, too, but h5py joins their selections one by one, which takes
        # up to ten times as long as decompressing them.
        chunk_rows = array.chunks[0] if array.chunks else 1
        changes = np.flatnonzero(np.diff(rows // chunk_rows)) + 1
        bounds = [0, *changes.tolist(), len(rows)] if len(rows) else []
        for start, stop in itertools.pairwise(bounds):
            first = int(rows[start])
            try:
                block = array[first : int(rows[stop - 1]) + 1]
            except (OSError, RuntimeError) as error:
                sample = int(np.flatnonzero(self.rows == first)[0])
                problem = (
                    f"cannot be read at row {first} of '{self.arrays[name]}' "
                    f"(sample {sample})"
                )
                reason = f"{problem}: {_one_line(error)}"
                hint = "the file is damaged, or its compression is not installed"
                raise self._error(f"{reason}; {hint}") from error
            values[start:stop] = block[rows[start:stop] - first]
        return torch.from_numpy(values)

    def _error(self, problem: str) -> UsageError:
        return UsageError(f"{self._setting}: {self.file} {problem}")

    def _array_error(self, name: str, problem: str) -> UsageError:
        setting = self._array_settings.get(name, self._setting)
        return UsageError(f"{setting}: '{self.arrays[name]}' in {self.file} {problem}")


def _array_paths(handle: Any) -> list[str]:
    """Returns the paths of the first arrays of a file."""
    import h5py

    paths: list[str] = []

    def collect(path: str, item: Any) -> bool | None:
        if isinstance(item, h5py.Dataset):
            paths.append(path)
        # Any other value than None ends the visit.
        return True if len(paths) == _LISTED_ARRAYS else None

    handle.visititems(collect)
    return paths


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _close_before_fork() -> None:
    # A child would share the position in an open file, and HDF5 its cache of the file.
    _READING.acquire()
    for dataset in list(_OPEN):
        dataset.close()


os.register_at_fork(
    before=_close_before_fork,
    after_in_parent=_READING.release,
    after_in_child=_READING.release,
)
