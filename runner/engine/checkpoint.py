"""Checkpoints: tensors as safetensors, the rest as JSON, never a pickle.

A checkpoint is a folder that is written beside its final place, made durable and renamed, so that what bears a
checkpoint's name is whole. The two newest are kept.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from runner.api import State
from runner.errors import CheckpointError

FORMAT = 1
KEPT = 2
TENSORS, REST, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


def save(folder: Path, step: int, state: State) -> Path:
    """Writes ``folder/step-000000001234`` and removes all but the newest two.

    Args:
        folder: the run's checkpoints.
        step: environment steps or updates so far.
        state: nested dictionaries and lists of tensors, numbers, strings, booleans and None.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"step-{step:012d}"
    if final.exists():
        return final
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    rest = _without_tensors(state, "", tensors)
    save_file(tensors, partial / TENSORS)
    (partial / REST).write_text(json.dumps(rest))
    manifest = {"format": FORMAT, "step": step, "sha256": {name: _digest(partial / name) for name in (TENSORS, REST)}}
    (partial / MANIFEST).write_text(json.dumps(manifest))
    for name in (TENSORS, REST, MANIFEST, "."):
        _sync(partial / name)
    partial.rename(final)
    _sync(folder)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def load(path: Path) -> State:
    """Reads a checkpoint into host memory and checks it against its manifest.

    Raises:
        CheckpointError: a file is missing or damaged, or a newer version of the runner wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] > FORMAT:
            raise CheckpointError(f"{path}: format {manifest['format']} is newer than this version reads ({FORMAT})")
        for name, digest in manifest["sha256"].items():
            if _digest(path / Path(name).name) != digest:
                raise CheckpointError(f"{path / name}: damaged (its checksum differs from the manifest's)")
        rest = json.loads((path / REST).read_text())
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a usable checkpoint: {error}") from None
    state: State = _with_tensors(rest, load_file(path / TENSORS))
    return state


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*"))


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The same structure with every tensor replaced by its name; dictionaries become lists, to keep integer keys."""
    if isinstance(value, torch.Tensor):
        name = f"{len(tensors)}{path}"  # counted, because keys may hold any character
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, _without_tensors(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_without_tensors(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path}: a checkpoint cannot hold a {type(value).__name__}")


def _with_tensors(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    (kind, value), *_ = node.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "items":
        return {key: _with_tensors(item, tensors) for key, item in value}
    if kind == "list":
        return [_with_tensors(item, tensors) for item in value]
    if kind == "tuple":
        return tuple(_with_tensors(item, tensors) for item in value)
    return value


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
