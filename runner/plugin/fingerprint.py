"""Fingerprints of data, which identify the data of a training."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from runner.system.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from runner.plugin.nested_content import NestedContent

COMPLETE_BYTES = 4 * 2**30
"""Total size of files above which only both ends of every file are read."""
END_BYTES = 2**16
SETTLED_SECONDS = 2.0
"""A file that was written this shortly before it was read may change again without another time."""
_LARGEST_LISTING = 2_000_000


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


def fingerprint_of_data(*data: Any, content: NestedContent | None = None) -> str | None:
    """Returns a digest of tables in memory, of arrays and tensors in attributes of other datasets,
    and of files that are named there; attributes of inner datasets and objects are included.

    Nothing is read through the datasets themselves: they may not be used before worker processes
    have their copies.

    Args:
        data: The datasets.
        content: Their content before anything was read; None collects it.

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
    inner = _digest_of_content(NestedContent(others) if content is None else content)
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


def _digest_of_content(content: NestedContent) -> str | None:
    import numpy as np
    import torch

    parts = []
    sizes = [array.nbytes for array in content.arrays]
    complete = sum(sizes) <= COMPLETE_BYTES
    for array in content.arrays:
        header = f"{array.dtype}\0{tuple(array.shape)}\0"
        if isinstance(array, torch.Tensor):
            digest = _content(array if complete else array.reshape(-1)[:END_BYTES])
        else:
            covered = array if complete else array.reshape(-1)[:END_BYTES]
            digest = hashlib.sha256(np.ascontiguousarray(covered).tobytes()).digest()
        parts.append(header.encode() + digest)
    if files := sorted(set(_files_in(content.objects, -1))):
        base = Path(os.path.commonpath([path.parent for path in files]))
        parts.append(fingerprint_of_files(files, base).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest() if parts else None


def _fingerprint_of_outer(data: Iterable[Any]) -> str | None:
    """Returns a digest of tables, and of files that datasets name themselves."""
    digest = hashlib.sha256()
    has_content = False
    for item in data:
        tensors = getattr(item, "tensors", None)
        if isinstance(tensors, Mapping):
            for name, tensor in sorted(tensors.items()):
                header = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
                digest.update(header.encode(errors="surrogatepass") + _content(tensor))
                has_content = True
        elif paths := files_of_data(item):
            base = Path(os.path.commonpath([path.parent for path in paths]))
            digest.update(fingerprint_of_files(paths, base).encode())
            has_content = True
    return digest.hexdigest() if has_content else None


def files_of_data(data: Any) -> list[Path]:
    """Returns the files whose absolute paths the attributes of a dataset contain."""
    return sorted(set(_files_in(getattr(data, "__dict__", {}))))


def _content(tensor: Tensor) -> bytes:
    import torch

    plain = tensor.detach().cpu()
    # A sparse tensor has no single block of memory.
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    content = plain.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).digest()


def _files_in(value: Any, depth: int = 0) -> Iterator[Path]:
    """Yields the files that paths in nested plain containers name."""
    if isinstance(value, Path | str):
        path = Path(value)
        with suppress(OSError, ValueError):
            if path.is_absolute() and path.is_file():
                yield path
        return
    # A structure that is deeper or larger is not a listing of files, and takes long to search.
    if depth >= 4 or not isinstance(value, Mapping | list | tuple):
        return
    if len(value) <= _LARGEST_LISTING:
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, Path | str | Mapping | list | tuple):
                yield from _files_in(item, depth + 1)


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
