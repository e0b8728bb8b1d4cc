"""Checkpoints: tensors as safetensors, the rest as JSON, never a pickle.

A checkpoint is a folder, ``step-000000001234``. Its manifest has the SHA-256 of every file, and of itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from runner.plugin.source import Ring
from runner.system.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runner.plugin.source import State

FORMAT = 1
REST, MANIFEST = "state.json", "manifest.json"
_CHECKPOINT = re.compile(r"step-\d{12}")
_ROWS = re.compile(r"rows-(\d+)-(\d+)-(\d+)\.safetensors")
_FILE = re.compile(rf"{re.escape(REST)}|tensors-\d+\.safetensors|{_ROWS.pattern}")
ASIDE = "damaged-"
"""Stands before the name of a damaged checkpoint that ``load_newest`` passed over."""
_log = logging.getLogger(__name__)


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written."""


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))


def name_of(step: int) -> str:
    """The folder of the checkpoint at that step."""
    return f"step-{step:012d}"


def rows_name(ring: str, first: int, last: int) -> str:
    """The file that has the rows of a ring from the number ``first`` up to ``last``, which is left out."""
    return f"rows-{ring}-{first:012d}-{last:012d}.safetensors"


def rows_of(name: str) -> tuple[str, int, int] | None:
    """The arguments of ``rows_name``; None if the file is another one."""
    match = _ROWS.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match else None


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(step: int, score: float | None, files: Mapping[str, str], done: int | None = None) -> str:
    """A manifest: one line of JSON, and one with its SHA-256; ``done`` is the same as ``step`` unless told."""
    done = step if done is None else done
    text = json.dumps({"format": FORMAT, "step": step, "done": done, "score": score, "sha256": dict(files)})
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; the files are not looked at.

    Raises:
        DamagedError: something is missing or not what was written.
        CheckpointError: a newer version of the runner wrote it.
    """
    file = path / MANIFEST
    try:
        if file.is_symlink():
            raise DamagedError(f"{file}: is a link")
        text, _, rest = file.read_text().partition("\n")
        manifest: dict[str, Any] = json.loads(text)
        newer = manifest["format"] > FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{file}: {_reason(error)}") from None
    if newer:
        known = f"{FORMAT}, the newest that this version of the runner reads"
        raise CheckpointError(
            f"{path}: its format {manifest['format']} is newer than {known}; resume with the version that wrote it"
        )
    if rest.strip() != hashlib.sha256(text.encode()).hexdigest():
        raise DamagedError(f"{file}: damaged (its checksum differs)")
    return manifest


def load(path: Path) -> State:
    """Reads a checkpoint, after every file has been compared with the manifest.

    Tensors come into host memory at once, rings when their rows are asked for. Raises as ``read_manifest`` does.
    """
    files: dict[str, str] = read_manifest(path)["sha256"]
    for name, expected in files.items():
        if not _FILE.fullmatch(name):
            raise DamagedError(f"{path / MANIFEST}: names a file that no checkpoint has: {name!r}")
        if (path / name).is_symlink():
            raise DamagedError(f"{path / name}: is a link")
        try:
            found = digest(path / name)
        except OSError as error:
            raise DamagedError(f"{path / name}: {_reason(error)}") from None
        if found != expected:
            raise DamagedError(f"{path / name}: damaged (its checksum differs from the manifest's)")
    try:
        rest = json.loads((path / REST).read_text())
        tensors: dict[str, torch.Tensor] = {}
        for name in files:
            if name.startswith("tensors-"):
                tensors |= load_file(path / name)
        state: State = _unpack(rest, tensors, partial(_ring, path, list(files)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedError(f"{path}: {_reason(error)}") from None
    return state


def load_newest(folder: Path) -> tuple[Path, State] | None:
    """Reads the newest checkpoint that is whole; None if none has been written yet.

    Damaged ones are said and set aside, so that the training can write them again. The caller holds the run's lock.

    Raises:
        CheckpointError: all are damaged, or a newer version of the runner wrote the newest.
    """
    found = checkpoints(folder)
    for number, path in enumerate(reversed(found)):
        try:
            state = load(path)
        except DamagedError as error:
            _log.warning("%s; the checkpoint before it is used, if there is one", error)
            continue
        for damaged in found[len(found) - number :]:
            damaged.rename(damaged.with_name(ASIDE + damaged.name))
        return path, state
    if found:
        raise CheckpointError(f"{folder}: all {len(found)} checkpoints are damaged; start the run anew: runner run")
    return None


def best(paths: list[Path]) -> Path | None:
    """The checkpoint with the highest score, the last of several; None if none has a score."""
    found, highest = None, float("-inf")
    for path in paths:
        with suppress(CheckpointError):
            score = read_manifest(path)["score"]
            if score is not None and score >= highest:
                found, highest = path, score
    return found


def _unpack(node: Any, tensors: Mapping[str, torch.Tensor], ring: Callable[..., Ring]) -> Any:
    """Puts together what ``pack`` of the writer took apart; ``ring`` makes one of what is said of it."""
    (kind, value), *_ = node.items()
    match kind:
        case "tensor":
            # A copy where torch allocates, in the layout that it had: tensors of a safetensors file begin anywhere in
            # it, and matrix products round differently with other alignment or strides, so a state that is used where
            # it was read would not continue bit for bit.
            tensor, stride = tensors[value], node["stride"]
            if stride is None:
                return tensor.clone()
            return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        case "ring":
            return ring(**value)
        case "items":
            return {key: _unpack(item, tensors, ring) for key, item in value}
        case "list" | "tuple":
            items = [_unpack(item, tensors, ring) for item in value]
            return items if kind == "list" else tuple(items)
    return value


def _ring(path: Path, files: list[str], name: str, capacity: int, written: int) -> Ring:
    """A ring whose rows are read from files when they are asked for."""
    segments = sorted(found[1:] for file in files if (found := rows_of(file)) and found[0] == name)

    @lru_cache(maxsize=2)
    def rows(first: int, last: int) -> torch.Tensor:
        return load_file(path / rows_name(name, first, last))["rows"]

    def read(first: int, last: int) -> torch.Tensor:
        parts = [
            rows(start, end)[max(first - start, 0) : last - start]
            for start, end in segments
            if start < last and end > first
        ]
        return torch.cat(parts)

    return Ring(capacity, written, read)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
