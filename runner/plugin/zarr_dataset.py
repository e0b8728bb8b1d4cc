"""Samples in the arrays of a Zarr group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from runner.plugin.chunked_dataset import ChunkedDataset, one_line
from runner.system.errors import UsageError
from runner.system.suggestions import suggestion

EXTRA = "pip install 'proven-runner[zarr]'"
ARCHIVES = (".zip",)
"""Endings of a group in one file; any other group is a folder."""
_LISTED_ARRAYS = 20


class ZarrDataset(ChunkedDataset):
    """Samples in the arrays of a Zarr group (versions 2 and 3), read by chunks; see
    ``ChunkedDataset``.

    The group is a folder, or a file with the ending ``.zip``. As Zarr defines it, a chunk that was
    never written has the array's fill value.

    Attributes:
        files: All files of a group that is a folder, which fingerprints cover.
    """

    # What a damaged chunk raises depends on its compression.
    read_errors: ClassVar[tuple[type[Exception], ...]] = (Exception,)

    def __init__(self, file: Path | str, *arguments: Any, **options: Any) -> None:
        super().__init__(file, *arguments, **options)
        self.files = [str(path) for path in _files_of(self.file)]

    def _file(self) -> Any:
        """Opens the group."""
        try:
            import zarr
            from zarr.storage import ZipStore
        except ModuleNotFoundError as error:
            raise UsageError(
                f"data.kind: Zarr groups need the package '{error.name}': {EXTRA}"
            ) from error
        if not self.file.exists():
            raise UsageError(f"{self._setting}: no such file or folder: {self.file}")
        try:
            is_archive = self.file.suffix in ARCHIVES
            store = ZipStore(self.file, mode="r") if is_archive else str(self.file)
            return _Group(zarr.open_group(store, mode="r"))
        # Metadata may be damaged in any way.
        except Exception as error:
            problem = f"cannot be read as a Zarr group ({one_line(error)})"
            raise self._error(
                f"{problem}; it is damaged, or of another format"
            ) from error

    def _find_array(self, handle: Any, name: str) -> Any:
        """Returns an array of the open group."""
        import zarr

        path = self.arrays[name]
        try:
            array = handle.group.get(path)
        except Exception as error:
            raise self._array_error(
                name, f"cannot be read ({one_line(error)}); it is damaged"
            ) from error
        if not isinstance(array, zarr.Array):
            problem = "is a group" if isinstance(array, zarr.Group) else "is missing"
            raise self._array_error(
                name, f"{problem}{suggestion(path, _array_paths(handle.group))}"
            )
        return array


class _Group:
    """An open group, with the store that has to be closed."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file of an archive."""
        self.group.store.close()


def _files_of(path: Path) -> Iterator[Path]:
    """Yields the files of a group that is a folder."""
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())


def _array_paths(group: Any) -> list[str]:
    """Returns the paths of the first arrays of a group."""
    import zarr

    members = (
        path
        for path, item in group.members(max_depth=None)
        if isinstance(item, zarr.Array)
    )
    return list(itertools.islice(members, _LISTED_ARRAYS))
