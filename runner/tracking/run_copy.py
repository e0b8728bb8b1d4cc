"""Second copies of runs, on storage that outlives a machine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.system import files
from runner.system.errors import StorageError, UsageError
from runner.system.workspace_paths import LOCK_NAME, RECORD
from runner.tracking.record import Record
from runner.tracking.store import Store
from runner.tracking.workspace import SPOOL, Workspace

_CHECKPOINTS = "checkpoints"
_MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"step-\d{12}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,127}")
# The record is the last one, because a run without it is not found.
_FILES = ("recipe.yaml", LOCK_NAME, "run.log", SPOOL, f"{SPOOL.removesuffix('.jsonl')}.offset", RECORD)
"""Files that a resumed run reads, besides its checkpoints."""


def open_storage(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL and the path in it.

    Raises:
        UsageError: No file system is installed for the URL.
    """
    # Not needed by most runs.
    import fsspec

    try:
        storage, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"tracking.second_copy: {url}: {error}") from None
    return storage, str(path).rstrip("/")


class RunCopy:
    """The second copy of a run's folder.

    Args:
        url: Folder of all copies, as fsspec names it.
        run_dir: Folder of the run; the copy has its name.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self._storage, root = open_storage(url)
        self._target = f"{root}/{run_dir.name}"
        self._run_dir = run_dir
        # The thread of the updates, and the end of the training.
        self._lock = threading.Lock()
        self._copied: set[str] = set()
        # Where files are, by name and digest: checkpoints may share them.
        self._places: dict[tuple[str, str], str] = {}

    def update(self) -> None:
        """Copies checkpoints that the copy does not have, and removes those that the run has removed."""
        with self._lock:
            names = self._local_names()
            missing = [name for name in names if name not in self._copied]
            if not missing:
                return
            for name in missing:
                self._copy_checkpoint(name)
            self._copy_files()
            self._remove_others(names)

    def close(self) -> None:
        """Copies what is left, with the final status of the run."""
        self.update()
        with self._lock:
            self._copy_files()

    def _local_names(self) -> list[str]:
        manifests = self._run_dir.glob(f"{_CHECKPOINTS}/*/{_MANIFEST}")
        names = [path.parent.name for path in manifests]
        return sorted(name for name in names if _CHECKPOINT.fullmatch(name))

    def _copy_checkpoint(self, name: str) -> None:
        source = self._run_dir / _CHECKPOINTS / name
        target = f"{self._target}/{_CHECKPOINTS}/{name}"
        manifest = source / _MANIFEST
        digests: dict[str, str] = json.loads(manifest.read_bytes().partition(b"\n")[0])["sha256"]
        self._storage.makedirs(target, exist_ok=True)
        for file_name, digest in digests.items():
            place = f"{target}/{file_name}"
            earlier = self._places.get((file_name, digest))
            if earlier is not None and self._storage.exists(earlier):
                self._storage.cp_file(earlier, place)
            else:
                self._storage.put_file(str(source / file_name), place)
            self._places[file_name, digest] = place
        # A checkpoint without its manifest is not read.
        self._storage.put_file(str(manifest), f"{target}/{_MANIFEST}")
        self._copied.add(name)

    def _copy_files(self) -> None:
        self._storage.makedirs(self._target, exist_ok=True)
        for name in _FILES:
            path = self._run_dir / name
            if path.exists():
                self._storage.put_file(str(path), f"{self._target}/{name}")

    def _remove_others(self, names: list[str]) -> None:
        for path in self._storage.ls(f"{self._target}/{_CHECKPOINTS}", detail=False, refresh=True):
            name = str(path).rstrip("/").rpartition("/")[2]
            if name not in names:
                self._storage.rm(path, recursive=True)
                self._copied.discard(name)


def find_copy(url: str, digest: str, takeover: bool = False) -> str | None:
    """Returns the URL of the newest copy of an unfinished run of a recipe; None without one.

    Runs that another machine may be training are passed over.

    Args:
        url: Folder of all copies.
        digest: Digest of the recipe.
        takeover: Whether a process on another machine counts as dead.

    Raises:
        StorageError: The folder cannot be read.
    """
    storage, root = open_storage(url)
    newest: tuple[float, str] | None = None
    try:
        paths = storage.ls(root, detail=False) if storage.exists(root) else []
        for path in paths:
            name = str(path).rstrip("/").rpartition("/")[2]
            record = _record(storage, f"{root}/{name}")
            if record is None or record.digest != digest or record.status == "FINISHED":
                continue
            if record.at_work and not (takeover or record.is_stale):
                continue
            if newest is None or record.started > newest[0]:
                newest = (record.started, name)
    except OSError as error:
        raise StorageError(f"tracking.second_copy: {url} cannot be read: {error}") from error
    return f"{url.rstrip('/')}/{newest[1]}" if newest else None


def restore(url: str, workspace: Workspace) -> Path:
    """Copies a run from its second copy into a workspace, where it can be resumed.

    Args:
        url: The copy.
        workspace: The workspace, which does not have the run.

    Returns:
        The folder of the run.

    Raises:
        UsageError: There is no such copy, the workspace has the run, or MLflow has not.
        StorageError: The copy cannot be read, or the workspace not written.
    """
    storage, root = open_storage(url)
    name = root.rpartition("/")[2]
    try:
        record = _record(storage, root)
        if record is None or record.name != name or not _PLAIN_NAME.fullmatch(name):
            raise UsageError(f"{url} is no copy of a run")
        target = workspace.runs / name
        if target.exists():
            raise UsageError(f"run {name} is in this workspace: runner resume {name}")
        _require_tracking(record, workspace)
        partial_folder = workspace.runs / f".{name}.partial"
        files.remove_quietly(partial_folder)
        for source, parts in _contents(storage, root):
            path = partial_folder.joinpath(*parts)
            files.make_folder(path.parent)
            storage.get_file(source, str(path))
        files.rename(partial_folder, target)
    except OSError as error:
        raise StorageError(f"{url} cannot be copied to {workspace.runs}: {error}") from error
    return target


def _record(storage: Any, root: str) -> Record | None:
    """Returns the record of a copy; None if there is none that can be read."""
    try:
        return Record.model_validate_json(storage.cat_file(f"{root}/{RECORD}"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _require_tracking(record: Record, workspace: Workspace) -> None:
    """Raises a UsageError if MLflow's store in this workspace does not have the run."""
    store = Store(workspace)
    if record.run_id is not None and not store.has_run(record.run_id):
        raise UsageError(
            f"run {record.name}: its metrics are in the MLflow store of another machine; "
            "name it in MLFLOW_TRACKING_URI, and use a server for runs that move"
        )


def _contents(storage: Any, root: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the files of a copy with their place in a run's folder."""
    for name in _FILES:
        if storage.exists(f"{root}/{name}"):
            yield f"{root}/{name}", (name,)
    for path in storage.find(f"{root}/{_CHECKPOINTS}"):
        folder, file_name = str(path).rsplit("/", 2)[1:]
        # Other names are not of the runner, and might lead out of the folder.
        if _CHECKPOINT.fullmatch(folder) and _PLAIN_NAME.fullmatch(file_name):
            yield str(path), (_CHECKPOINTS, folder, file_name)
