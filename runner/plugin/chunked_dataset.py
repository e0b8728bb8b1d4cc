"""Samples in the arrays of a file that may be larger than memory."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from runner.system.errors import UsageError

_WIDENED = {"uint16": "int32", "uint32": "int64"}
"""Types that few operations of torch accept, and the smallest type with the same values."""
_SIGNED = frozenset({"int8", "int16", "int32", "int64"})
_FRACTIONAL = frozenset({"float16", "float32", "float64", "complex64", "complex128"})
_TYPES = frozenset({"bool", "uint8"}) | _SIGNED | _FRACTIONAL
_READING = threading.RLock()
"""Held while a file is read, so that no process is forked meanwhile."""
_OPEN: weakref.WeakSet[ChunkedDataset] = weakref.WeakSet()


class ChunkedDataset(Dataset[dict[str, Tensor]], ABC):
    """Samples in the arrays of a file: a sample is one row of each array, by name.

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
        UsageError: The package of the format is not installed, the file cannot be read, or an array
            is missing, of another length, or of a type that torch does not have.
    """

    read_errors: ClassVar[tuple[type[Exception], ...]]
    """Exceptions of an access to a damaged chunk."""

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

    @abstractmethod
    def _file(self) -> Any:
        """Opens the file.

        Raises:
            UsageError: The package is not installed, or the file cannot be read.
        """

    @abstractmethod
    def _find_array(self, handle: Any, name: str) -> Any:
        """Returns an array of the open file.

        Raises:
            UsageError: There is no such array, or its rows are elsewhere.
        """

    def _array(self, handle: Any, name: str) -> Any:
        """Returns an array of the open file, whose type is checked."""
        array = self._find_array(handle, name)
        if not array.shape:
            raise self._array_error(name, "has no dimension, and should have samples")
        kind = getattr(array.dtype, "name", str(array.dtype))
        if kind not in _TYPES and kind not in _WIDENED:
            supported = ", ".join(sorted(_TYPES | _WIDENED.keys()))
            raise self._array_error(
                name, f"is of type {array.dtype}, which is none of {supported}"
            )
        return array

    def _common_length(self, opened: Mapping[str, Any]) -> int:
        lengths = {name: array.shape[0] for name, array in opened.items()}
        if len(set(lengths.values())) > 1:
            counts = [
                f"'{self.arrays[name]}' has {count:,}"
                for name, count in lengths.items()
            ]
            raise self._error(
                f"arrays should have one row for each sample, but {', '.join(counts)}"
            )
        length: int = next(iter(lengths.values()))
        return length

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
            except self.read_errors as error:
                sample = int(np.flatnonzero(self.rows == first)[0])
                problem = (
                    f"cannot be read at row {first} of '{self.arrays[name]}' "
                    f"(sample {sample})"
                )
                reason = f"{problem}: {one_line(error)}"
                hint = "the file is damaged, or its compression is not installed"
                raise self._error(f"{reason}; {hint}") from error
            values[start:stop] = block[rows[start:stop] - first]
        return torch.from_numpy(values)

    def _error(self, problem: str) -> UsageError:
        return UsageError(f"{self._setting}: {self.file} {problem}")

    def _array_error(self, name: str, problem: str) -> UsageError:
        setting = self._array_settings.get(name, self._setting)
        return UsageError(f"{setting}: '{self.arrays[name]}' in {self.file} {problem}")


def one_line(error: Exception) -> str:
    """Returns a message without line breaks."""
    return " ".join(str(error).split())


def _close_before_fork() -> None:
    # A child would share the position in an open file, and the cache of its library.
    _READING.acquire()
    for dataset in list(_OPEN):
        dataset.close()


os.register_at_fork(
    before=_close_before_fork,
    after_in_parent=_READING.release,
    after_in_child=_READING.release,
)
