"""Reading the files of a checkpoint.

Each file is compared with the manifest and with the form of such a file; a ``DamagedError`` names
the file that differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from runner.plugin.ring import Ring
from runner.system.errors import CheckpointError, DamagedError
from runner.system.files import read_regular, write_text
from runner.system.manifest import FileDigest
from runner.system.stored_json import (
    MOST_BYTES,
    is_count,
    is_digest,
    is_finite_number,
    parse_json,
    sealed,
    split_sealed,
)
from runner.training.tensor_files import ROWS, check_rows, read_header

FORMAT = 2
STATE_FILE = "state.json"
MANIFEST = "manifest.json"
ROWS_FILE = re.compile(r"rows-(\d{1,9})-(\d{12,18})-(\d{12,18})\.safetensors")
_TENSORS_FILE = re.compile(r"tensors-\d{1,9}\.safetensors")
_FILE = re.compile(
    rf"{re.escape(STATE_FILE)}|{_TENSORS_FILE.pattern}|{ROWS_FILE.pattern}"
)
_KEYS = {"format", "step", "done", "score", "sha256"}


def read_files(path: Path) -> tuple[Any, dict[str, Tensor], list[Path]]:
    """Reads the files of a checkpoint, after every file has been compared with the manifest.

    Returns:
        The state as ``pack`` made it for JSON, the tensors by name, and the paths of all files.

    Raises:
        CheckpointError: As ``read_manifest``.
    """
    manifest = read_manifest(path)
    sizes = manifest.get("bytes", {})
    for name, expected in manifest["sha256"].items():
        with reading(path / name):
            digest = FileDigest.of(path / name)
            if digest != FileDigest(expected, sizes.get(name, digest.size)):
                raise ValueError("damaged (its checksum differs from the manifest's)")
    with reading(path / STATE_FILE):
        text = read_regular(path / STATE_FILE, MOST_BYTES).decode()
        node = parse_json(text)
    names = list(manifest["sha256"])
    _check_rows(path, names)
    # The references to tensors, or more: a bound on the headers before they are parsed.
    most_tensors = text.count('"tensor"') + text.count('"array"')
    tensors = _read_tensors(path, names, most_tensors)
    return node, tensors, [path / name for name in names]


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, without reading its files.

    Raises:
        DamagedError: It differs from what was written.
        CheckpointError: A newer version of the runner wrote it.
    """
    with reading(path):
        if path.is_symlink():
            raise ValueError("is a link")
    with reading(path / MANIFEST):
        manifest, is_intact = split_sealed(path / MANIFEST)
        # A newer version may have another checksum, so the format is compared first.
        version = manifest.get("format")
        if type(version) is int and version > FORMAT:
            raise CheckpointError(
                f"{path}: its format {version} is newer than {FORMAT}, the newest that this "
                "version of the runner reads; resume with the version that wrote it"
            )
        if not is_intact:
            raise ValueError("damaged (its checksum differs)")
        _check_manifest(manifest)
    return manifest


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a line of JSON, and one with its SHA-256."""
    write_text(path / MANIFEST, sealed(manifest))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Surrounds the reading of a file of a checkpoint; a DamagedError names a damaged file."""
    try:
        yield
    except CheckpointError:
        raise
    # The file may come from anyone, and torch, numpy and safetensors raise whatever they like.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DamagedError(f"{path}: {' '.join(reason.split())[:400]}") from None


def ring_of(files: Iterable[Path], name: str, capacity: int, written: int) -> Ring:
    """Returns a ring whose rows are read from files when they are needed.

    Raises:
        ValueError: Rows of it are in no file.
    """
    ranges = segments(files, name)
    # Consecutive reads often need the same file.
    content = lru_cache(maxsize=2)(load_file)

    def read(first: int, last: int) -> Tensor:
        pieces = [
            content(path)[ROWS][max(first - start, 0) : last - start]
            for start, end, path in ranges
            if start < last and end > first
        ]
        return torch.cat(pieces)

    ring = Ring(capacity, written, read)
    end = ring.first
    for start, last, _ in ranges:
        if start > end:
            break
        end = max(end, last)
    if end < written:
        raise ValueError(
            f"rows of ring {name} are in no file: number {end:,} and those after it"
        )
    return ring


def segments(files: Iterable[Path], ring: str) -> list[tuple[int, int, Path]]:
    """Returns the files of a ring in order, with the numbers of their rows.

    These are the number of the first row and that after the last row.
    """
    matches = ((path, ROWS_FILE.fullmatch(path.name)) for path in files)
    return sorted(
        (int(match[2]), int(match[3]), path)
        for path, match in matches
        if match and match[1] == ring
    )


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    if not manifest.keys() >= _KEYS:
        raise ValueError(f"has no {', '.join(sorted(_KEYS - manifest.keys()))}")
    if not is_count(manifest["format"]) or not is_count(manifest["step"]):
        raise ValueError("format and step should be integers")
    if not is_finite_number(manifest["done"]):
        raise ValueError("done should be a number")
    if manifest["score"] is not None and not is_finite_number(manifest["score"]):
        raise ValueError("score should be a finite number, or null")
    digests = manifest["sha256"]
    scores = manifest.get("scores", {})
    if not isinstance(scores, dict) or not all(map(is_finite_number, scores.values())):
        raise ValueError("scores should have a finite number for every metric")
    # Manifests of earlier versions have no sizes.
    sizes = manifest.get("bytes", {})
    if not isinstance(digests, dict) or not all(map(is_digest, digests.values())):
        raise ValueError("sha256 should have a SHA-256 for every file")
    if not isinstance(sizes, dict) or not all(map(is_count, sizes.values())):
        raise ValueError("bytes should have a size for every file")
    for name in digests:
        if _FILE.fullmatch(name) is None:
            raise ValueError(f"names a file that no checkpoint has: {name!r:.80}")


def _check_rows(path: Path, names: Iterable[str]) -> None:
    """Compares the headers of files with rows: of one ring, they have one type and one shape."""
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in names:
        match = ROWS_FILE.fullmatch(name)
        if match is None:
            continue
        ring, first, last = match.groups()
        with reading(path / name):
            header = check_rows(read_header(path / name, 1), int(last) - int(first))
            form = (header.dtype, header.shape[1:])
            if forms.setdefault(ring, form) != form:
                raise ValueError(
                    "has rows of another type or shape than other files of its ring"
                )


def _read_tensors(
    path: Path, names: Iterable[str], most_tensors: int
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in names:
        if _TENSORS_FILE.fullmatch(name) is None:
            continue
        with reading(path / name):
            # The limit is for the files together.
            header = read_header(path / name, most_tensors - len(tensors))
            if header.keys() & tensors.keys() or ROWS in header:
                raise ValueError("has tensors of another file")
            tensors |= load_file(path / name)
    return tensors
