"""Samples in the arrays of an HDF5 file."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from runner.plugin.chunked_dataset import ChunkedDataset, one_line
from runner.system.errors import UsageError
from runner.system.suggestions import suggestion

EXTRA = "pip install 'proven-runner[hdf5]'"
_LISTED_ARRAYS = 20


class Hdf5Dataset(ChunkedDataset):
    """Samples in the arrays of an HDF5 file, read by chunks; see ``ChunkedDataset``."""

    read_errors: ClassVar[tuple[type[Exception], ...]] = (OSError, RuntimeError)

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
            problem = f"cannot be read as an HDF5 file ({one_line(error)})"
            raise self._error(
                f"{problem}; it is damaged, truncated, or of another format"
            ) from error

    def _find_array(self, handle: Any, name: str) -> Any:
        """Returns an array of the open file, whose origin is checked."""
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
        return array


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
