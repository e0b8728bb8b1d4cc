"""Checkpoints: tensors as safetensors, everything else as JSON, never a pickle.

A failed write leaves the previous checkpoint intact.

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from runner.plugin.ring import Ring
from runner.plugin.source import State
from runner.recipe.keeping import KeepConfig
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
from runner.system.torch_settings import default_contexts
from runner.training.checkpoint_files import (
    FORMAT,
    MANIFEST,
    ROWS_FILE,
    STATE_FILE,
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
# Tensors are copied file by file, so writing needs no more memory than about this.
FILE_BYTES = 64 * 2**20
# Rows are linked file by file, so a small file repeats few rows.
SEGMENT_BYTES = 4 * 2**20
# A small checkpoint is copied, and written while the training continues.
BACKGROUND_BYTES = 64 * 2**20
_MIB = 2**20
# A damaged checkpoint that ``load_newest`` skipped is renamed, so that it can be written again.
_SKIPPED = "damaged-"
_Content = tuple[str, dict[str, Tensor]]
_Rows = Callable[[], Tensor]
_log = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-" + 12 * "[0-9]"))


def best(paths: list[Path]) -> Path | None:
    """Returns the checkpoint with the highest score, the last of several; None without a score."""
    scores = {
        path: manifest["score"]
        for path, manifest in _intact_manifests(paths)
        if manifest["score"] is not None
    }
    return max(scores, key=scores.__getitem__, default=None)


def best_by_metric(paths: list[Path], count: int) -> set[Path]:
    """Returns the checkpoints with the highest scores of each metric.

    Args:
        paths: Checkpoints, oldest first.
        count: How many of each metric; the later one of two equal scores is better.
    """
    by_metric: defaultdict[str, list[tuple[float, Path]]] = defaultdict(list)
    for path, manifest in _intact_manifests(paths):
        for name, score in manifest.get("scores", {}).items():
            by_metric[name].append((score, path))
    return {
        path
        for scores in by_metric.values()
        # A stable order: of equal scores, the newest checkpoint is first.
        for _, path in sorted(scores, key=itemgetter(0), reverse=True)[:count]
    }


def _intact_manifests(paths: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the manifests of undamaged checkpoints, newest first."""
    for path in reversed(paths):
        # A damaged checkpoint cannot be the best.
        with suppress(CheckpointError):
            yield path, read_manifest(path)


def load_newest(
    folder: Path, check: Callable[[State, Path], None] | None = None
) -> State | None:
    """Reads the newest undamaged checkpoint.

    Damaged ones are reported and renamed, so that the training can write them again. The caller
    holds the run's lock.

    Args:
        folder: Folder of the run's checkpoints.
        check: Raises a DamagedError about a state that cannot be used, given the checkpoint's path.

    Returns:
        The state; None if no checkpoint has been written yet.

    Raises:
        CheckpointError: All are damaged, or a newer version of the runner wrote the newest.
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
            for damaged_path in damaged:
                _skip(damaged_path)
            return state
    if damaged:
        count = len(damaged)
        raise CheckpointError(
            f"{folder}: all {count} checkpoints are damaged; start a new run: runner run"
        )
    return None


def load(path: Path) -> State:
    """Reads a checkpoint, after every file has been compared with the manifest.

    Tensors are read into host memory immediately, rings when their rows are requested. Raises the
    errors of ``read_manifest``.
    """
    # A context of the caller may create tensors elsewhere.
    with default_contexts():
        node, tensors, files = read_files(path)
        with reading(path / STATE_FILE):
            state = unpack(node, tensors, partial(ring_of, files))
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
        self,
        folder: Path,
        prepare: Callable[[], None] = lambda: None,
        keep: KeepConfig | None = None,
    ) -> None:
        """Removes the incomplete checkpoints of a process that died.

        Args:
            folder: Folder of the run's checkpoints.
            prepare: Called before a checkpoint gets its name; raises ``OSError`` to refuse it.
            keep: Selects the checkpoints that stay.
        """
        self.folder = folder
        self._keep = keep or KeepConfig()
        # Why the last checkpoint could not be written.
        self.failure: OSError | None = None
        self._prepare = prepare
        self._writing: Future[None] | None = None
        self._has_warned = False
        for partial_folder in folder.glob(".*.partial"):
            remove_quietly(partial_folder)

    def save(
        self,
        step: int,
        state: State,
        score: float | None = None,
        done: int | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Writes ``step-<step>``, in a thread if it is small; waits for the previous write.

        A full or failing disk is reported once, and older checkpoints stay; see ``failure``. The
        best checkpoint is not removed.

        Args:
            step: Larger for the newer of two checkpoints.
            state: The state.
            score: The objective; a larger one is better.
            done: The progress in the recipe's unit, if it differs from ``step``.
            scores: Those of the metrics whose best checkpoints stay, by name.
        """
        self.wait()
        path = self.folder / f"step-{step:012d}"
        if path.exists():
            if score is None:
                return
            # A signal requested it before it was evaluated.
            _skip(path)
        node, tensors, rings = pack(state)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "done": step if done is None else done,
            "score": score,
            "scores": dict(scores or {}),
        }
        with self._attempt(path) as partial_folder:
            remove_quietly(partial_folder)
            make_folder(partial_folder)
            reach("checkpoint.begin")
            manifest["sha256"], rows, size = self._link(rings, partial_folder)
            size += sum(tensor.nbytes for tensor in tensors.values())
            self._check_space(partial_folder, path, size)
            files = _files(tensors, rows)
            finish = partial(self._finish, path, manifest, node)
            if size > BACKGROUND_BYTES:
                finish(files)
                return
            pool = ThreadPoolExecutor(1, "runner-checkpoint")
            # The list copies all tensors now, because the training continues.
            self._writing = pool.submit(finish, list(files))
            # The thread ends when the checkpoint is written.
            pool.shutdown(wait=False)

    def wait(self) -> None:
        """Waits for the pending write, and raises its errors except those of the disk."""
        if self._writing is not None:
            self._writing.result()

    def newest(self) -> Path | None:
        """Returns the newest checkpoint that is written."""
        return next(reversed(checkpoints(self.folder)), None)

    @contextmanager
    def _attempt(self, path: Path) -> Iterator[Path]:
        """Yields the temporary folder of a checkpoint; removes it if the disk refuses files."""
        partial_folder = path.with_name(f".{path.name}.partial")
        try:
            yield partial_folder
        except OSError as error:
            remove_quietly(partial_folder)
            if self.failure is None:
                _log.warning(
                    "the checkpoint %s was not written: %s; the newest is %s",
                    path.name,
                    error.strerror or error,
                    self.newest() or "none",
                )
            self.failure = error

    def _check_space(self, folder: Path, path: Path, size: int) -> None:
        """Raises an ``OSError`` if the disk has no space, and warns once if it has little."""
        free = shutil.disk_usage(folder).free
        sizes = f"it needs {size / _MIB:.1f} MiB and the disk has {free / _MIB:.1f} MiB free"
        if free < size + _MIB:
            raise OSError(errno.ENOSPC, sizes)
        if free < 3 * size and not self._has_warned:
            self._has_warned = True
            _log.warning("the disk is nearly full for checkpoint %s: %s", path, sizes)

    def _link(
        self, rings: Mapping[str, Ring], folder: Path
    ) -> tuple[dict[str, str], dict[str, _Rows], int]:
        """Links rows of rings that the second-newest checkpoint has.

        Returns:
            The digests of the linked files, the rows to write by file name, and their bytes.
        """
        linked: dict[str, str] = {}
        unlinked: dict[str, _Rows] = {}
        digests = self._earlier_digests()
        size = 0
        for name, ring in rings.items():
            earlier_files = segments(digests, name)
            for first, last, nbytes in _ranges(ring):
                path = next(
                    (
                        path
                        for start, end, path in earlier_files
                        if start <= first and last <= end
                    ),
                    None,
                )
                if path is not None:
                    # The file may be gone, and some disks have no links.
                    with suppress(OSError):
                        link(path, folder / path.name)
                        linked[path.name] = digests[path]
                        continue
                file_name = f"rows-{name}-{first:012d}-{last:012d}.safetensors"
                unlinked[file_name] = partial(ring.read, first, last)
                size += nbytes
        return linked, unlinked, size

    def _earlier_digests(self) -> dict[Path, str]:
        """Returns the digests of the files of the second-newest checkpoint."""
        paths = checkpoints(self.folder)
        if len(paths) < 2:
            return {}
        # Nothing is linked to a damaged checkpoint; all rows are written.
        try:
            digests = read_manifest(paths[-2])["sha256"]
        except CheckpointError:
            return {}
        return {paths[-2] / name: digest for name, digest in digests.items()}

    def _finish(
        self,
        path: Path,
        manifest: dict[str, Any],
        node: Any,
        files: Iterable[_Content],
    ) -> None:
        """Writes the remaining files, gives the checkpoint its name and removes older ones."""
        with self._attempt(path) as partial_folder:
            digests = manifest["sha256"]
            for name, tensors in files:
                file = partial_folder / name
                save_file(tensors, file)
                # Frees the copies before the next tensors are copied.
                del tensors
                is_rows = ROWS_FILE.fullmatch(name)
                point = "checkpoint.segment" if is_rows else "checkpoint.tensors"
                digests[name] = _durable(file, point)
            file = partial_folder / STATE_FILE
            write_text(file, _text(node))
            digests[STATE_FILE] = _durable(file, "checkpoint.state")
            manifest["bytes"] = {
                name: (partial_folder / name).stat().st_size for name in digests
            }
            write_manifest(partial_folder, manifest)
            _durable(partial_folder / MANIFEST, "checkpoint.manifest")
            sync(partial_folder)
            self._prepare()
            reach("checkpoint.synced")
            rename(partial_folder, path)
            sync(self.folder)
            self.failure = None
            self._remove_older()

    def _remove_older(self) -> None:
        """Removes checkpoints that do not stay, and damaged ones."""
        try:
            reach("checkpoint.renamed")
            paths = checkpoints(self.folder)
            best_paths = {best(paths), *best_by_metric(paths, self._keep.best)}
            skipped = self.folder.glob(f"{_SKIPPED}step-*")
            for path in (*paths[: -self._keep.last], *skipped):
                if path not in best_paths:
                    remove(path)
            reach("checkpoint.pruned")
        except OSError as error:
            _log.warning(
                "older checkpoints in %s could not be removed: %s",
                self.folder,
                error.strerror or error,
            )


def write_rehearsal(folder: Path, node: Any, tensors: Mapping[str, Tensor]) -> Path:
    """Writes the files of a checkpoint without rings into a new folder, which the caller removes.

    Should the process die before, the next ``Writer`` removes it.

    Raises:
        OSError: The disk refuses a file.
    """
    path = folder / REHEARSAL
    remove_quietly(path)
    make_folder(path)
    digests: dict[str, str] = {}
    for name, content in _files(tensors, {}):
        try:
            save_file(content, path / name)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error
        digests[name] = sha256(path / name)
    write_text(path / STATE_FILE, _text(node))
    digests[STATE_FILE] = sha256(path / STATE_FILE)
    manifest = {
        "format": FORMAT,
        "step": 0,
        "done": 0,
        "score": None,
        "sha256": digests,
    }
    write_manifest(path, manifest)
    return path


def kept(state: State) -> State:
    """Returns the state that a checkpoint would restore, without writing it.

    Rings are shared with the argument.

    Raises:
        UnpackableError: A checkpoint cannot hold some value.
    """
    node, tensors, rings = pack(state)
    copies = {name: stored(tensor) for name, tensor in tensors.items()}
    parsed = json.loads(json.dumps(node))
    restored: State = unpack(parsed, copies, lambda name, **_: rings[name])
    return restored


def _skip(path: Path) -> None:
    rename(path, path.with_name(_SKIPPED + path.name))


def _text(node: Any) -> str:
    """Returns the state as JSON; an UnpackableError if it is too large to be read again."""
    text = json.dumps(node)
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
    """Yields name and content of every file to write; a content is copied when it is reached."""
    groups: list[dict[str, Tensor]] = []
    free = 0
    for name, tensor in tensors.items():
        if not groups or tensor.nbytes > free:
            groups.append({})
            free = FILE_BYTES
        groups[-1][name] = tensor
        free -= tensor.nbytes
    for number, group in enumerate(groups):
        content = {name: stored(tensor) for name, tensor in group.items()}
        yield f"tensors-{number}.safetensors", content
        # Frees the copies before the next tensors are copied.
        del content
    for name, read in rows.items():
        yield name, {"rows": stored(read())}


def _durable(path: Path, point: str) -> str:
    """Makes a file durable; returns its SHA-256."""
    sync(path)
    reach(point, path)
    return sha256(path)


def _ranges(ring: Ring) -> Iterator[tuple[int, int, int]]:
    """Yields first and last number and bytes of the rows of every file.

    Files always start at the same numbers, so that a later checkpoint can link them.
    """
    if ring.written == 0:
        return
    row_bytes = max(1, ring.read(ring.first, ring.first + 1).nbytes)
    rows = max(1, SEGMENT_BYTES // row_bytes)
    for start in range(ring.first // rows * rows, ring.written, rows):
        first = max(start, ring.first)
        last = min(start + rows, ring.written)
        yield first, last, (last - first) * row_bytes
