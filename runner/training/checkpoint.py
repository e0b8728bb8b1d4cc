"""Checkpoints: tensors as safetensors, everything else as JSON, never a pickle; a failed write
leaves the previous checkpoint intact.

A checkpoint is a folder, ``step-000000001234``, with ``state.json``, in which names represent
tensors and rings; ``tensors-<number>.safetensors``; for each ring,
``rows-<ring>-<first>-<last>.safetensors`` with the rows of these numbers, without the last; and
``manifest.json``, which has SHA-256 and size of every file, and a SHA-256 of these entries.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runner.plugin.source import Ring, State
from runner.system.errors import CheckpointError, DamagedError
from runner.system.faults import reach
from runner.system.files import (
    link,
    make_folder,
    remove,
    remove_quietly,
    rename,
    sha256,
    sync,
    write_text,
)
from runner.system.stored_json import check_size
from runner.training.checkpoint_files import (
    FORMAT,
    MANIFEST,
    REST,
    ROWS_FILE,
    read_files,
    read_manifest,
    reading,
    ring_of,
    segments,
    write_manifest,
)
from runner.training.packing import UnpackableError, pack, stored
from runner.training.unpacking import unpack

CHECKPOINTS = "checkpoints"
"""The folder of a run in which its checkpoints are."""
REHEARSAL = ".rehearsal.partial"
KEPT = 2
"""The number of newest checkpoints that are saved, in addition to the best."""
FILE_BYTES = 64 * 2**20
"""Tensors are spread over files of about this size, so that writing needs no more memory than that."""
SEGMENT_BYTES = 4 * 2**20
"""About the size of a file with rows of a ring."""
BESIDE_BYTES = 64 * 2**20
"""A checkpoint up to this size is copied and written during the training; for a
larger one, the training waits.
"""
_MIB = 2**20
_ASIDE = "damaged-"
"""Prefix of the name of a damaged checkpoint that ``load_newest`` skipped."""
_Content = tuple[str, dict[str, Tensor]]
"""The name of a file and the tensors in it."""
_Rows = Callable[[], Tensor]
_log = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-" + 12 * "[0-9]"))


def best(paths: list[Path]) -> Path | None:
    """The checkpoint with the highest score, the last of several; None if none has a score."""
    scores = {}
    for path in reversed(paths):
        with suppress(CheckpointError):
            scores[path] = read_manifest(path)["score"]
    return max(
        (path for path in scores if scores[path] is not None),
        key=scores.__getitem__,
        default=None,
    )


def load_newest(
    folder: Path, check: Callable[[State, Path], None] | None = None
) -> State | None:
    """Reads the newest undamaged checkpoint; None if none has been written yet.

    Damaged ones are reported and set aside, so that the training can write them again. The caller holds the run's lock.
    ``check`` raises a DamagedError about a state that cannot be used, given the checkpoint's path.

    Raises:
        CheckpointError: all are damaged, or a newer version of the runner wrote the newest.
    """
    damaged: list[Path] = []
    for path in reversed(checkpoints(folder)):
        try:
            state = load(path)
            if check is not None:
                check(state, path)
        except DamagedError as error:
            _log.warning("%s; the checkpoint before it is used, if there is one", error)
            damaged.append(path)
        else:
            for each in damaged:
                rename(each, each.with_name(_ASIDE + each.name))
            return state
    if damaged:
        raise CheckpointError(
            f"{folder}: all {len(damaged)} checkpoints are damaged; start a new run: runner run"
        )
    return None


def load(path: Path) -> State:
    """Reads a checkpoint, after every file has been compared with the manifest.

    Tensors are read into host memory immediately, rings when their rows are requested. Raises the
    errors of ``read_manifest``.
    """
    rest, tensors, files = read_files(path)
    with reading(path / REST):
        state = unpack(rest, tensors, partial(ring_of, files))
        if not isinstance(state, dict):
            raise ValueError("should be a mapping")
    return state


class Writer:
    """Writes the checkpoints of one run.

    A checkpoint is written under a temporary name, made durable and renamed, so that a folder with
    the name of a checkpoint is always complete; then older ones are removed. Rows of a ring that
    are in the second-newest checkpoint are linked, not written again: the two newest checkpoints
    share no file, so that one damaged file never damages both.
    """

    def __init__(
        self, folder: Path, prepare: Callable[[], None] = lambda: None
    ) -> None:
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

    def save(
        self,
        step: int,
        state: State,
        score: float | None = None,
        done: int | None = None,
    ) -> None:
        """Writes ``step-<step>``, during the training if it is small; waits for the previous write.

        A full or failing disk is reported once, and older checkpoints stay; see ``failure``. Of two
        checkpoints, the newer has the larger ``step``; ``done`` is the progress in the recipe's
        unit, if it differs. A larger ``score`` is better; the best checkpoint is kept.
        """
        self.wait()
        final = self.folder / f"step-{step:012d}"
        if final.exists():
            if score is None:
                return
            # A signal requested it before it was evaluated.
            rename(final, final.with_name(_ASIDE + final.name))
        rest, tensors, rings = pack(state)
        done = step if done is None else done
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "done": done,
            "score": score,
        }
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
                _log.warning(
                    "the disk is nearly full for checkpoint %s: %s", final, sizes
                )
            files, finish = (
                _files(tensors, rows),
                partial(self._finish, final, manifest, rest),
            )
            if size > BESIDE_BYTES:
                finish(files)
                return
            pool = ThreadPoolExecutor(1, "runner-checkpoint")
            # Copied now, because the training continues.
            self._writing = pool.submit(finish, list(files))
            pool.shutdown(wait=False)  # its thread ends when this is written

    def wait(self) -> None:
        """Waits until the pending write is finished, and raises its errors except
        those of the disk.
        """
        if self._writing is not None:
            self._writing.result()

    def newest(self) -> Path | None:
        """The newest checkpoint that is written."""
        return next(reversed(checkpoints(self.folder)), None)

    @contextmanager
    def _attempt(self, final: Path) -> Iterator[Path]:
        """Yields the temporary folder of a checkpoint; removes it if the disk
        refuses the checkpoint.
        """
        beside = final.with_name(f".{final.name}.partial")
        try:
            yield beside
        except OSError as error:
            remove_quietly(beside)
            if self.failure is None:
                said, newest = error.strerror or error, self.newest() or "none"
                _log.warning(
                    "the checkpoint %s was not written: %s; the newest is %s",
                    final.name,
                    said,
                    newest,
                )
            self.failure = error

    def _link(
        self, rings: Mapping[str, Ring], folder: Path
    ) -> tuple[dict[str, str], dict[str, _Rows], int]:
        """Links what the checkpoint before the last has: the digests of these files, others by name and their bytes."""
        linked: dict[str, str] = {}
        others: dict[str, _Rows] = {}
        there: dict[Path, str] = {}
        size = 0
        for earlier in checkpoints(self.folder)[-2:-1]:  # there may be none
            with suppress(
                CheckpointError
            ):  # then nothing is linked and everything is written
                there = {
                    earlier / name: digest
                    for name, digest in read_manifest(earlier)["sha256"].items()
                }
        for name, ring in rings.items():
            earlier_files = segments(there, name)
            for first, last, nbytes in _ranges(ring):
                try:
                    path = next(
                        path
                        for start, end, path in earlier_files
                        if start <= first and last <= end
                    )
                    link(path, folder / path.name)
                    linked[path.name] = there[path]
                except (
                    StopIteration,
                    OSError,
                ):  # not there, or gone, or a disk without links
                    others[f"rows-{name}-{first:012d}-{last:012d}.safetensors"] = (
                        partial(ring.read, first, last)
                    )
                    size += nbytes
        return linked, others, size

    def _finish(
        self,
        final: Path,
        manifest: dict[str, Any],
        rest: Any,
        files: Iterable[_Content],
    ) -> None:
        """Writes what is not there yet, gives the checkpoint its name and prunes older ones."""
        with self._attempt(final) as beside:
            for name, tensors in files:
                save_file(tensors, beside / name)
                del tensors  # before the next are copied
                point = (
                    "checkpoint.segment"
                    if ROWS_FILE.fullmatch(name)
                    else "checkpoint.tensors"
                )
                manifest["sha256"][name] = _durable(beside / name, point)
            write_text(beside / REST, _text(rest))
            manifest["sha256"][REST] = _durable(beside / REST, "checkpoint.state")
            manifest["bytes"] = {
                name: (beside / name).stat().st_size for name in manifest["sha256"]
            }
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
                _log.warning(
                    "older checkpoints in %s could not be removed: %s",
                    self.folder,
                    error.strerror or error,
                )


def write_rehearsal(folder: Path, rest: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Writes the files of a checkpoint without rings into a new folder, which the caller removes.

    Should the process die before, the next ``Writer`` removes it.

    Raises:
        OSError: the disk refuses a file.
    """
    path = folder / REHEARSAL
    remove_quietly(path)
    make_folder(path)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "step": 0,
        "done": 0,
        "score": None,
        "sha256": {},
    }
    for name, content in _files(tensors, {}):
        try:
            save_file(content, path / name)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        manifest["sha256"][name] = sha256(path / name)
    write_text(path / REST, _text(rest))
    manifest["sha256"][REST] = sha256(path / REST)
    write_manifest(path, manifest)
    return path


def kept(state: State) -> State:
    """Returns the state that a checkpoint would restore, without writing it;
    rings are shared with the argument.

    Raises:
        UnpackableError: a checkpoint cannot hold some value.
    """
    rest, tensors, rings = pack(state)
    copies = {name: stored(tensor) for name, tensor in tensors.items()}
    return unpack(json.loads(json.dumps(rest)), copies, lambda name, **_: rings[name])  # type: ignore[no-any-return]


def _text(rest: Any) -> str:
    """Returns the state as JSON; an UnpackableError if it is too large to be read again."""
    text = json.dumps(rest)
    try:
        check_size(text)
    except ValueError as error:
        raise UnpackableError(
            f"/: the state {error} without its tensors: keep numbers in tensors"
        ) from None
    return text


def _files(
    tensors: Mapping[str, Tensor], rows: Mapping[str, _Rows]
) -> Iterator[_Content]:
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
        yield (
            f"tensors-{number}.safetensors",
            {name: stored(tensor) for name, tensor in part.items()},
        )
    for name, read in rows.items():
        yield name, {"rows": stored(read())}


def _durable(path: Path, point: str) -> str:
    """Makes a file durable; returns its SHA-256."""
    sync(path)
    reach(point, path)
    return sha256(path)


def _ranges(ring: Ring) -> Iterator[tuple[int, int, int]]:
    """Returns first and last number and bytes of the rows of every file; files
    always start at the same numbers.
    """
    if ring.written == 0:
        return
    row = max(1, ring.read(ring.first, ring.first + 1).nbytes)
    rows = max(1, SEGMENT_BYTES // row)
    for start in range(ring.first // rows * rows, ring.written, rows):
        first, last = max(start, ring.first), min(start + rows, ring.written)
        yield first, last, (last - first) * row
