"""Writes checkpoints so that whatever happens, the one before stays whole."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from runner.plugin.source import Ring
from runner.system.errors import CheckpointError
from runner.system.faults import reach
from runner.system.files import sync
from runner.train.checkpoint import reader as checkpoint
from runner.train.checkpoint.reader import ASIDE, MANIFEST, REST

if TYPE_CHECKING:
    from runner.plugin.source import State

KEPT = 2
"""Newest checkpoints that are kept, beside the best."""
FILE_BYTES = 64 * 2**20
"""Tensors are spread over files of about this size, so that writing needs no more memory than that."""
SEGMENT_BYTES = 4 * 2**20
"""About the size of a file with rows of a ring."""
BESIDE_BYTES = 64 * 2**20
"""A checkpoint up to this size is copied and written while the training goes on; a larger one is waited for."""
_MIB = 2**20
_log = logging.getLogger(__name__)


@dataclass
class _Piece:
    """One file of tensors, of about ``size`` bytes; ``tensors`` makes copies of them."""

    name: str
    size: int
    tensors: Callable[[], dict[str, Tensor]]
    digest: str = ""
    """Its SHA-256, once it is in its place."""


class Writer:
    """Writes the checkpoints of one run.

    A checkpoint is written beside its final place, made durable and renamed, so that what bears a checkpoint's name is
    whole; then older ones are pruned. Rows of a ring that the checkpoint before the last has are linked, not written
    again: the two newest checkpoints share no file, so that one damaged file never spoils both.
    """

    def __init__(self, folder: Path, prepare: Callable[[], None] = lambda: None) -> None:
        """Removes what a process that died has left half written in a run's folder of checkpoints.

        ``prepare`` is called before a checkpoint gets its name; it raises ``OSError`` if it must not.
        """
        self.folder = folder
        self.failure: OSError | None = None
        """Why the last checkpoint could not be written."""
        self.written_bytes = 0
        """Size of the last checkpoint, without what was linked."""
        self._prepare = prepare
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._warned = False
        for partial_folder in folder.glob(".*.partial"):
            shutil.rmtree(partial_folder, ignore_errors=True)

    def save(self, step: int, state: State, score: float | None = None, done: int | None = None) -> None:
        """Writes ``step-<step>``, beside the training if it is small; waits for the one before.

        A disk that is full or fails is said once, and leaves older checkpoints as they are; see ``failure``. Of two
        checkpoints, the newer has the larger ``step``; ``done`` is the progress in the recipe's unit, if it differs.
        The larger a ``score`` the better; the best checkpoint is kept.
        """
        self.wait()
        if (self.folder / checkpoint.name_of(step)).exists():
            return
        folder = self._beside(step)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            reach("checkpoint.begin")
            rest, tensors, rings = pack(state)
            pieces = [*_parts(tensors), *self._segments(rings, folder)]
            size, free = sum(piece.size for piece in pieces if not piece.digest), shutil.disk_usage(folder).free
            if free < size + _MIB:
                message = f"it needs {size / _MIB:.1f} MiB and the disk has {free / _MIB:.1f} MiB free"
                raise OSError(errno.ENOSPC, message)
        except OSError as error:
            self._failed(step, error)
            return
        manifest = partial(checkpoint.manifest_text, step, score, done=done)
        if size > BESIDE_BYTES:
            self._finish(step, pieces, rest, manifest)
            return
        for piece in pieces:
            if not piece.digest:  # its tensors may change before they are written
                piece.tensors = partial(dict, piece.tensors())

        def finish() -> None:
            try:
                self._finish(step, pieces, rest, manifest)
            except BaseException as error:  # raised again in the training's thread
                self._error = error

        self._thread = threading.Thread(target=finish, name="runner-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until what is being written is written, and raises what went wrong with it, but for the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def newest(self) -> Path | None:
        """The newest checkpoint that is written."""
        return next(reversed(checkpoint.checkpoints(self.folder)), None)

    def _beside(self, step: int) -> Path:
        return self.folder / f".{checkpoint.name_of(step)}.partial"

    def _segments(self, rings: dict[str, Ring], folder: Path) -> Iterator[_Piece]:
        """The rows of all rings; those that the checkpoint before the last has are linked."""
        earlier = checkpoint.checkpoints(self.folder)[:-1]
        digests: dict[str, str] = {}
        if earlier:
            with suppress(CheckpointError):  # then nothing is linked and everything is written
                digests = checkpoint.read_manifest(earlier[-1])["sha256"]
        for ring_name, ring in rings.items():
            there = [rows for name in digests if (rows := checkpoint.rows_of(name)) and rows[0] == ring_name]
            for first, last, size in _ranges(ring):
                piece = _Piece(checkpoint.rows_name(ring_name, first, last), size, partial(_rows, ring, first, last))
                found = next((rows for rows in there if rows[1] <= first and last <= rows[2]), None)
                if found:
                    name = checkpoint.rows_name(*found)
                    with suppress(OSError):  # a disk without links, or a file that is gone: it is written
                        os.link(earlier[-1] / name, folder / name)
                        piece.name, piece.digest = name, digests[name]
                yield piece

    def _finish(self, step: int, pieces: list[_Piece], rest: Any, manifest: Callable[[dict[str, str]], str]) -> None:
        """Writes what is not there yet, gives the checkpoint its name and prunes older ones."""
        folder, size = self._beside(step), sum(piece.size for piece in pieces if not piece.digest)
        try:
            for piece in pieces:
                if not piece.digest:
                    path = folder / piece.name
                    save_file(piece.tensors(), path)
                    sync(path)
                    reach("checkpoint.segment" if checkpoint.rows_of(piece.name) else "checkpoint.tensors", path)
                    piece.digest = checkpoint.digest(path)
            (folder / REST).write_text(json.dumps(rest))
            sync(folder / REST)
            reach("checkpoint.state", folder / REST)
            digests = {piece.name: piece.digest for piece in pieces} | {REST: checkpoint.digest(folder / REST)}
            (folder / MANIFEST).write_text(manifest(digests))
            sync(folder / MANIFEST)
            reach("checkpoint.manifest", folder / MANIFEST)
            sync(folder)
            self._prepare()
            reach("checkpoint.synced")
            folder.rename(self.folder / checkpoint.name_of(step))
            sync(self.folder)
        except OSError as error:
            self._failed(step, error)
            return
        self.failure, self.written_bytes = None, size
        try:
            reach("checkpoint.renamed")
            found = checkpoint.checkpoints(self.folder)
            keep = {*found[-KEPT:], checkpoint.best(found)}
            for path in [*(each for each in found if each not in keep), *self.folder.glob(f"{ASIDE}step-*")]:
                shutil.rmtree(path)
            reach("checkpoint.pruned")
        except OSError as error:
            _log.warning("older checkpoints in %s could not be removed: %s", self.folder, error.strerror or error)
        free = shutil.disk_usage(self.folder).free
        if free < 2 * size and not self._warned:
            self._warned = True
            _log.warning(
                "the disk of %s is nearly full: %.1f MiB free, and a checkpoint takes %.1f MiB",
                self.folder, free / _MIB, size / _MIB,
            )  # fmt: skip

    def _failed(self, step: int, error: OSError) -> None:
        shutil.rmtree(self._beside(step), ignore_errors=True)
        if self.failure is None:
            said, newest = error.strerror or error, self.newest() or "none"
            _log.warning("the checkpoint at step %d was not written: %s; the newest is %s", step, said, newest)
        self.failure = error


def pack(state: State) -> tuple[Any, dict[str, Tensor], dict[str, Ring]]:
    """Takes a state apart; the reader puts it together again. A TypeError names what no checkpoint can hold.

    Returns:
        What JSON can hold, in which dictionaries are lists of pairs to keep integer keys; and by the names that it
        refers to, the tensors of the state, not copies, and its rings.
    """
    tensors: dict[str, Tensor] = {}
    rings: dict[str, Ring] = {}

    def packed(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = f"{len(tensors)}{path}"  # counted, because keys may hold any character
            tensors[name] = value
            return {"tensor": name, "stride": None if value.is_contiguous() else _dense_stride(value)}
        if isinstance(value, Ring):
            name = str(len(rings))
            rings[name] = value
            return {"ring": {"name": name, "capacity": value.capacity, "written": value.written}}
        if isinstance(value, dict):
            return {"items": [[key, packed(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [packed(item, f"{path}/{i}") for i, item in enumerate(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise TypeError(f"{path}: a checkpoint cannot hold a {type(value).__name__}")

    return packed(state, ""), tensors, rings


def _dense_stride(tensor: Tensor) -> list[int] | None:
    """The strides of a tensor that fills its memory in another order than that of its dimensions, else None."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return list(tensor.stride())


def _parts(tensors: dict[str, Tensor]) -> list[_Piece]:
    """The tensors, spread over files."""
    pieces: list[_Piece] = []
    for name, tensor in tensors.items():
        if not pieces or pieces[-1].size + tensor.nbytes > FILE_BYTES:
            part: dict[str, Tensor] = {}
            pieces.append(_Piece(f"tensors-{len(pieces)}.safetensors", 0, partial(_copies, part)))
        part[name] = tensor
        pieces[-1].size += tensor.nbytes
    return pieces


def _ranges(ring: Ring) -> Iterator[tuple[int, int, int]]:
    """First and last number and bytes of the rows of every file; the same numbers always begin a file."""
    if ring.written == 0:
        return
    row = max(1, ring.read(ring.first, ring.first + 1).nbytes)
    rows = max(1, SEGMENT_BYTES // row)
    for start in range(ring.first // rows * rows, ring.written, rows):
        first, last = max(start, ring.first), min(start + rows, ring.written)
        yield first, last, (last - first) * row


def _rows(ring: Ring, first: int, last: int) -> dict[str, Tensor]:
    return _copies({"rows": ring.read(first, last)})


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
