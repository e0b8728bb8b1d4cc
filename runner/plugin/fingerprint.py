"""Fingerprints of data, which identify the data of a training."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from runner.plugin.named_files import files_below_folders, files_of_attributes
from runner.system.files import replacing

if TYPE_CHECKING:
    from runner.plugin.nested_content import NestedContent

COMPLETE_BYTES = 4 * 2**30
"""Total size of files above which only both ends of every file are read."""
END_BYTES = 2**16
SETTLED_SECONDS = 2.0
"""A file that was written this shortly before it was read may change again without another time."""


def fingerprint_of_files(paths: Iterable[Path], base: Path | None = None) -> str:
    """Returns a digest of the contents of files, and of their names below ``base`` if it is given.

    A file whose size and modification time are those of the last time is not read again: its digest
    is in the user's cache. Where the files are plays no part, so data that were moved or copied
    have the same fingerprint.

    Args:
        paths: The files.
        base: The folder whose files they are.
    """
    files = sorted({path: path.stat() for path in paths}.items())
    complete = sum(status.st_size for _, status in files) <= COMPLETE_BYTES
    cache = _Cache(base or (files[0][0].parent if files else Path()))
    digest = hashlib.sha256(b"" if complete else b"ends")
    for path, status in files:
        # Names are separated from digests, so that no two listings give the same bytes.
        name = b"" if base is None else os.fsencode(path.relative_to(base))
        digest.update(name + b"\0" + cache.digest(path, status, complete).encode())
    cache.write()
    return digest.hexdigest()


def fingerprint_of_data(
    *data: Any, content: NestedContent | None = None, with_rows: bool = True
) -> str | None:
    """Returns a digest of tables in memory, of arrays, tensors and rows in attributes of other
    datasets, and of files that are named there; attributes of inner datasets and objects are
    included.

    Nothing is read through the datasets themselves: they may not be used before worker processes
    have their copies.

    Args:
        data: The datasets.
        content: Their content before anything was read; None collects it.
        with_rows: Whether rows are covered. They do not identify files that no attribute names.

    Returns:
        The digest; None without any content. After a plus sign follows the digest without inner
        content, as in locks of earlier versions.
    """
    # The recipe's part of the program imports this module, and must not wait for torch.
    from runner.plugin.nested_content import NestedContent

    outer = _fingerprint_of_outer(data)
    # The attribute of a table has been covered.
    others = [
        item for item in data if not isinstance(getattr(item, "tensors", None), Mapping)
    ]
    content = NestedContent(others) if content is None else content
    inner = _digest_of_content(content, with_rows)
    if inner is None:
        return outer
    complete = hashlib.sha256(f"{outer}+{inner}".encode()).hexdigest()
    return f"{complete}+{outer or ''}"


def is_same_data(locked: str, present: str | None) -> bool:
    """Returns whether two fingerprints are of the same data, also if the first is of an earlier
    version, which did not cover inner content.
    """
    if present is not None and "+" in present and "+" not in locked:
        return present.partition("+")[2] == locked
    return present == locked


def _digest_of_content(content: NestedContent, with_rows: bool) -> str | None:
    from runner.plugin.nested_content import LARGEST_CONTAINER
    from runner.plugin.value_content import digest_of_array, digest_of_rows

    complete = sum(array.nbytes for array in content.arrays) <= COMPLETE_BYTES
    elements = None if complete else END_BYTES
    parts = [digest_of_array(array, elements) for array in content.arrays]
    for rows in content.rows if with_rows else ():
        # Arrays in shorter containers are among the arrays.
        digest = digest_of_rows(rows, with_arrays=len(rows) > LARGEST_CONTAINER)
        if digest is not None:
            parts.append(digest)
    if files := files_of_attributes(content.objects):
        base = Path(os.path.commonpath([path.parent for path in files]))
        parts.append(fingerprint_of_files(files, base).encode())
    for attributes in content.outer_objects + content.objects:
        for folder, names in files_below_folders(attributes).items():
            paths = [folder / name for name in names]
            parts.append(fingerprint_of_files(paths, folder).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest() if parts else None


def _fingerprint_of_outer(data: Iterable[Any]) -> str | None:
    """Returns a digest of tables, and of files that datasets name themselves."""
    from runner.plugin.value_content import digest_of_tensor

    digest = hashlib.sha256()
    has_content = False
    for item in data:
        tensors = getattr(item, "tensors", None)
        if isinstance(tensors, Mapping):
            for name, tensor in sorted(tensors.items()):
                header = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
                digest.update(
                    header.encode(errors="surrogatepass") + digest_of_tensor(tensor)
                )
                has_content = True
        elif paths := files_of_data(item):
            base = Path(os.path.commonpath([path.parent for path in paths]))
            digest.update(fingerprint_of_files(paths, base).encode())
            has_content = True
    return digest.hexdigest() if has_content else None


def files_of_data(data: Any) -> list[Path]:
    """Returns the files whose absolute paths the attributes of a dataset contain."""
    return files_of_attributes(dict(getattr(data, "__dict__", {})))


class _Cache:
    """Digests of files by their names, for as long as size and modification time stay the same."""

    def __init__(self, folder: Path) -> None:
        name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
        cache = platformdirs.user_cache_dir("runner", appauthor=False)
        self._path = Path(cache, "fingerprints", f"{name}.json")
        self._entries: dict[str, list[Any]] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            content = json.loads(self._path.read_text(encoding="ascii"))
            self._entries = content if isinstance(content, dict) else {}

    def digest(self, path: Path, status: os.stat_result, complete: bool) -> str:
        """Returns the digest of a file, which is read only if it has changed."""
        key = str(path.absolute())
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, complete]
        entry = self._entries.get(key)
        if isinstance(entry, list) and entry[:-1] == stamp:
            return str(entry[-1])
        digest = _digest_of(path, status.st_size, complete)
        # A file may change again within the resolution of its modification time.
        if time.time() - status.st_mtime > SETTLED_SECONDS:
            self._entries[key] = [*stamp, digest]
            self._changed = True
        return digest

    def write(self) -> None:
        """Writes the digests for the next time."""
        # A cache that cannot be written costs only time.
        if self._changed:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._path) as partial:
                    partial.write_text(json.dumps(self._entries), encoding="ascii")


def _digest_of(path: Path, size: int, complete: bool) -> str:
    with path.open("rb") as file:
        if complete or size <= 2 * END_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        start = file.read(END_BYTES)
        file.seek(-END_BYTES, os.SEEK_END)
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()
