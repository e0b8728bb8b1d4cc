"""Checkpoints: tensors as safetensors, the rest as JSON, never a pickle; whatever happens, the one before stays whole.

A checkpoint is a folder, ``step-000000001234``, with ``state.json``, in which names stand for tensors and rings;
``tensors-<number>.safetensors``; for each ring, ``rows-<ring>-<first>-<last>.safetensors`` with the rows of these
numbers, the last left out; and ``manifest.json``, which has the SHA-256 of every file, and of itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runner.plugin.source import Ring, State
from runner.system.errors import CheckpointError
from runner.system.faults import reach
from runner.system.files import link, make_folder, remove, remove_quietly, rename, sha256, sync, write_text
from runner.train.packing import pack, stored, unpack

FORMAT = 2
REST, MANIFEST = "state.json", "manifest.json"
CHECKPOINTS = "checkpoints"
"""The folder of a run in which its checkpoints are."""
REHEARSAL = ".rehearsal.partial"
KEPT = 2
"""Newest checkpoints that are kept, beside the best."""
FILE_BYTES = 64 * 2**20
"""Tensors are spread over files of about this size, so that writing needs no more memory than that."""
SEGMENT_BYTES = 4 * 2**20
"""About the size of a file with rows of a ring."""
BESIDE_BYTES = 64 * 2**20
"""A checkpoint up to this size is copied and written while the training goes on; a larger one is waited for."""
_MIB = 2**20
_ROWS = re.compile(r"rows-(\d+)-(\d+)-(\d+)\.safetensors")
_FILE = re.compile(rf"{re.escape(REST)}|tensors-\d+\.safetensors|{_ROWS.pattern}")
_ASIDE = "damaged-"
"""Stands before the name of a damaged checkpoint that ``load_newest`` passed over."""
_Content = tuple[str, dict[str, Tensor]]
"""The name of a file and the tensors in it."""
_Rows = Callable[[], Tensor]
_log = logging.getLogger(__name__)


class DamagedError(CheckpointError):
    """A checkpoint that is not what was written."""


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-" + 12 * "[0-9]"))


def best(paths: list[Path]) -> Path | None:
    """The checkpoint with the highest score, the last of several; None if none has a score."""
    scores = {}
    for path in reversed(paths):
        with suppress(CheckpointError):
            scores[path] = read_manifest(path)["score"]
    return max((path for path in scores if scores[path] is not None), key=scores.__getitem__, default=None)


def load_newest(folder: Path) -> State | None:
    """Reads the newest checkpoint that is whole; None if none has been written yet.

    Damaged ones are said and set aside, so that the training can write them again. The caller holds the run's lock.

    Raises:
        CheckpointError: all are damaged, or a newer version of the runner wrote the newest.
    """
    damaged: list[Path] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = load(path)
        except DamagedError as error:
            _log.warning("%s; the checkpoint before it is used, if there is one", error)
            damaged.append(path)
        else:
            for each in damaged:
                rename(each, each.with_name(_ASIDE + each.name))
            return state
    if damaged:
        raise CheckpointError(f"{folder}: all {len(damaged)} checkpoints are damaged; start the run anew: runner run")
    return None


def load(path: Path) -> State:
    """Reads a checkpoint, after every file has been compared with the manifest.

    Tensors come into host memory at once, rings when their rows are asked for. Raises as ``read_manifest`` does.
    """
    rest, tensors, files = read_files(path)
    with _reading(path / REST):
        state: State = unpack(rest, tensors, partial(_ring, files))
    return state


def read_files(path: Path) -> tuple[Any, dict[str, Tensor], list[Path]]:
    """Reads the files of a checkpoint, after every file has been compared with the manifest.

    Returns:
        The state as ``pack`` made it for JSON, the tensors by name, and the paths of all files.

    Raises:
        CheckpointError: as ``read_manifest``.
    """
    files: dict[str, str] = read_manifest(path)["sha256"]
    for name, expected in files.items():
        if not _FILE.fullmatch(name):
            raise DamagedError(f"{path / MANIFEST}: names a file that no checkpoint has: {name!r}")
        with _reading(path / name):
            if sha256(path / name) != expected:
                raise ValueError("damaged (its checksum differs from the manifest's)")
    with _reading(path / REST):
        tensors: dict[str, Tensor] = {}
        for name in files:
            if name.startswith("tensors-"):
                tensors |= load_file(path / name)
        return json.loads((path / REST).read_text()), tensors, [path / name for name in files]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose files are not looked at; a DamagedError if it is not what was written.

    A CheckpointError says that a newer version of the runner wrote it.
    """
    with _reading(path / MANIFEST):
        text, _, digest = (path / MANIFEST).read_text().partition("\n")
        manifest: dict[str, Any] = json.loads(text)
        if manifest["format"] > FORMAT:
            known = f"{FORMAT}, the newest that this version of the runner reads"
            raise CheckpointError(
                f"{path}: its format {manifest['format']} is newer than {known}; resume with the version that wrote it"
            )
        if digest.strip() != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError("damaged (its checksum differs)")
    return manifest


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file of a checkpoint is a DamagedError that names it."""
    try:
        if path.is_symlink():
            raise ValueError("is a link")
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes a line of JSON, and one with its SHA-256."""
    text = json.dumps(manifest)
    write_text(path / MANIFEST, f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")


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
        self.folder, self._prepare = folder, prepare
        self.failure: OSError | None = None
        """Why the last checkpoint could not be written."""
        self._writing: Future[None] | None = None
        self._warned = False
        for partial_folder in folder.glob(".*.partial"):
            remove_quietly(partial_folder)

    def save(self, step: int, state: State, score: float | None = None, done: int | None = None) -> None:
        """Writes ``step-<step>``, beside the training if it is small; waits for the one before.

        A disk that is full or fails is said once, and leaves older checkpoints as they are; see ``failure``. Of two
        checkpoints, the newer has the larger ``step``; ``done`` is the progress in the recipe's unit, if it differs.
        The larger a ``score`` the better; the best checkpoint is kept.
        """
        self.wait()
        final = self.folder / f"step-{step:012d}"
        if final.exists():
            if score is None:
                return
            rename(final, final.with_name(_ASIDE + final.name))  # a signal asked for it before it was evaluated
        rest, tensors, rings = pack(state)
        done = step if done is None else done
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "done": done, "score": score}
        with self._attempt(final) as beside:
            remove_quietly(beside)
            make_folder(beside)
            reach("checkpoint.begin")
            manifest["sha256"], rows, size = self._link(rings, beside)
            size += sum(tensor.nbytes for tensor in tensors.values())
            free = shutil.disk_usage(beside).free
            sizes = f"it needs {size / _MIB:.1f} MiB and the disk has {free / _MIB:.1f} MiB free"
            if free < size + _MIB:
                raise OSError(errno.ENOSPC, sizes)
            if free < 3 * size and not self._warned:
                self._warned = True
                _log.warning("the disk is nearly full for checkpoint %s: %s", final, sizes)
            files, finish = _files(tensors, rows), partial(self._finish, final, manifest, rest)
            if size > BESIDE_BYTES:
                finish(files)
                return
            pool = ThreadPoolExecutor(1, "runner-checkpoint")
            self._writing = pool.submit(finish, list(files))  # copied now, because the training goes on
            pool.shutdown(wait=False)  # its thread ends when this is written

    def wait(self) -> None:
        """Waits until what is being written is written, and raises what went wrong with it, but for the disk."""
        if self._writing is not None:
            self._writing.result()

    def newest(self) -> Path | None:
        """The newest checkpoint that is written."""
        return next(reversed(checkpoints(self.folder)), None)

    @contextmanager
    def _attempt(self, final: Path) -> Iterator[Path]:
        """Where to write a checkpoint beside its final place; of one that the disk refuses nothing is left."""
        beside = final.with_name(f".{final.name}.partial")
        try:
            yield beside
        except OSError as error:
            remove_quietly(beside)
            if self.failure is None:
                said, newest = error.strerror or error, self.newest() or "none"
                _log.warning("the checkpoint %s was not written: %s; the newest is %s", final.name, said, newest)
            self.failure = error

    def _link(self, rings: Mapping[str, Ring], folder: Path) -> tuple[dict[str, str], dict[str, _Rows], int]:
        """Links what the checkpoint before the last has: the digests of these files, others by name and their bytes."""
        linked: dict[str, str] = {}
        others: dict[str, _Rows] = {}
        there: dict[Path, str] = {}
        size = 0
        for earlier in checkpoints(self.folder)[-2:-1]:  # there may be none
            with suppress(CheckpointError):  # then nothing is linked and everything is written
                there = {earlier / name: digest for name, digest in read_manifest(earlier)["sha256"].items()}
        for name, ring in rings.items():
            segments = _segments(there, name)
            for first, last, nbytes in _ranges(ring):
                try:
                    path = next(path for start, end, path in segments if start <= first and last <= end)
                    link(path, folder / path.name)
                    linked[path.name] = there[path]
                except (StopIteration, OSError):  # not there, or gone, or a disk without links
                    others[f"rows-{name}-{first:012d}-{last:012d}.safetensors"] = partial(ring.read, first, last)
                    size += nbytes
        return linked, others, size

    def _finish(self, final: Path, manifest: dict[str, Any], rest: Any, files: Iterable[_Content]) -> None:
        """Writes what is not there yet, gives the checkpoint its name and prunes older ones."""
        with self._attempt(final) as beside:
            for name, tensors in files:
                save_file(tensors, beside / name)
                del tensors  # before the next are copied
                point = "checkpoint.segment" if _ROWS.fullmatch(name) else "checkpoint.tensors"
                manifest["sha256"][name] = _durable(beside / name, point)
            write_text(beside / REST, json.dumps(rest))
            manifest["sha256"][REST] = _durable(beside / REST, "checkpoint.state")
            write_manifest(beside, manifest)
            _durable(beside / MANIFEST, "checkpoint.manifest")
            sync(beside)
            self._prepare()
            reach("checkpoint.synced")
            rename(beside, final)
            sync(self.folder)
            self.failure = None
            try:
                reach("checkpoint.renamed")
                found = checkpoints(self.folder)
                kept = best(found)
                for path in (*found[:-KEPT], *self.folder.glob(f"{_ASIDE}step-*")):
                    if path != kept:
                        remove(path)
                reach("checkpoint.pruned")
            except OSError as error:
                _log.warning("older checkpoints in %s could not be removed: %s", self.folder, error.strerror or error)


def write_rehearsal(folder: Path, rest: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Writes the files of a checkpoint without rings into a new folder, which the caller removes.

    Should the process die before, the next ``Writer`` removes it.

    Raises:
        OSError: the disk refuses a file.
    """
    path = folder / REHEARSAL
    remove_quietly(path)
    make_folder(path)
    manifest: dict[str, Any] = {"format": FORMAT, "step": 0, "done": 0, "score": None, "sha256": {}}
    for name, content in _files(tensors, {}):
        try:
            save_file(content, path / name)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        manifest["sha256"][name] = sha256(path / name)
    write_text(path / REST, json.dumps(rest))
    manifest["sha256"][REST] = sha256(path / REST)
    write_manifest(path, manifest)
    return path


def kept(state: State) -> State:
    """Returns what a checkpoint of a state would hold, without writing it; rings stay the state's own.

    Raises:
        UnpackableError: a checkpoint cannot hold some value.
    """
    rest, tensors, rings = pack(state)
    copies = {name: stored(tensor) for name, tensor in tensors.items()}
    return unpack(json.loads(json.dumps(rest)), copies, lambda name, **_: rings[name])  # type: ignore[no-any-return]


def _files(tensors: Mapping[str, Tensor], rows: Mapping[str, _Rows]) -> Iterator[_Content]:
    """Name and content of every file that is to be written, copied when its turn comes."""
    parts: list[dict[str, Tensor]] = []
    free = 0
    for name, tensor in tensors.items():
        if not parts or tensor.nbytes > free:
            parts.append({})
            free = FILE_BYTES
        parts[-1][name] = tensor
        free -= tensor.nbytes
    for number, part in enumerate(parts):
        yield f"tensors-{number}.safetensors", {name: stored(tensor) for name, tensor in part.items()}
    for name, read in rows.items():
        yield name, {"rows": stored(read())}


def _durable(path: Path, point: str) -> str:
    """Makes a file durable; returns its SHA-256."""
    sync(path)
    reach(point, path)
    return sha256(path)


def _ranges(ring: Ring) -> Iterator[tuple[int, int, int]]:
    """First and last number and bytes of the rows of every file; the same numbers always begin a file."""
    if ring.written == 0:
        return
    row = max(1, ring.read(ring.first, ring.first + 1).nbytes)
    rows = max(1, SEGMENT_BYTES // row)
    for start in range(ring.first // rows * rows, ring.written, rows):
        first, last = max(start, ring.first), min(start + rows, ring.written)
        yield first, last, (last - first) * row


def _segments(files: Iterable[Path], ring: str) -> list[tuple[int, int, Path]]:
    """The files with a ring's rows in order, each after the numbers of its first row and of that after its last."""
    found = [(path, match) for path in files if (match := _ROWS.fullmatch(path.name)) and match[1] == ring]
    return sorted((int(match[2]), int(match[3]), path) for path, match in found)


def _ring(files: list[Path], name: str, capacity: int, written: int) -> Ring:
    """A ring whose rows are read from files when they are asked for."""
    segments, content = _segments(files, name), lru_cache(maxsize=2)(load_file)

    def read(first: int, last: int) -> Tensor:
        inside = [(start, path) for start, end, path in segments if start < last and end > first]
        return torch.cat([content(path)["rows"][max(first - start, 0) : last - start] for start, path in inside])

    return Ring(capacity, written, read)
