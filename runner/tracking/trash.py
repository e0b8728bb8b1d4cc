"""Removed runs: in the workspace's trash, from where they can be restored, or deleted
permanently.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from runner.system.errors import StorageError, UsageError
from runner.system.files import is_link, make_folder, rename
from runner.system.files import remove as delete
from runner.tracking.lookup import below
from runner.tracking.record import GROUPS, Record
from runner.tracking.store import Store, shown
from runner.tracking.workspace import GLANCE_SECONDS, RunFolder, Workspace

_DOING = {"ablation": "measuring", "seeds": "training them", "grid": "training them"}


@dataclass(frozen=True)
class Removal:
    """The result of removing a run."""

    run: str
    trash: str | None
    """Where its folder is now; None if it is deleted permanently."""
    mlflow: str
    """The result in MLflow."""
    run_ids: list[str]
    """The ids that are now deleted in MLflow: its id, and those below it."""


def remove(workspace: Workspace, runs: Sequence[RunFolder], purge: bool, takeover: bool = False) -> list[Removal]:
    """Deletes runs in MLflow, and moves their folders to the trash, or purges them.

    An ablation goes with its variants, a group of seeds with its runs. MLflow keeps what is deleted, until
    ``mlflow gc``, and can restore it. With ``takeover``, a process on another machine that may be at one of them counts
    as gone.

    Raises:
        UsageError: a process is at one of them, or one is a study; then all stay.
        StorageError: MLflow does not answer, or a folder cannot be moved; then that one and those after it stay.
    """
    folders = {}
    for run in runs:
        for folder in (*_runs_of(workspace, run), run):
            folders[folder.path] = folder
    with ExitStack() as claims:
        # A group before its runs, because its message is more general.
        for folder in reversed(folders.values()):
            takeover = _refuse_active(folder, takeover)
            folder.claim(GLANCE_SECONDS, takeover)
            claims.callback(folder.release)
        return [_remove(workspace, folder, purge) for folder in folders.values()]


def _refuse_active(folder: RunFolder, takeover: bool) -> bool:
    """Raises a UsageError if a folder is in use; returns whether the folders below it count as abandoned."""
    record = folder.record()
    if record is None:
        return takeover
    if record.kind == "study":
        raise UsageError(f"{folder.name} is a study: 'runner study run FILE --fresh' forgets its trials")
    if record.kind not in _DOING or not record.at_work:
        return takeover
    if record.owner.alive:
        owner = f"process {record.owner.pid} on {record.owner.host}"
        raise UsageError(f"{folder.name} is in use: {owner} is {_DOING[record.kind]}")
    folder.confirm_abandoned(takeover)
    # It had started the processes of the runs below it.
    return True


def _remove(workspace: Workspace, folder: RunFolder, purge: bool) -> Removal:
    mlflow, run_ids = _deleted(workspace, folder.record())
    target = trash(workspace) / folder.name
    try:
        make_folder(target.parent)
        rename(folder.path, target)
        if purge:
            delete(target)
    except OSError as error:
        raise StorageError(f"{folder.path} cannot be removed: {error.strerror or error}") from error
    return Removal(folder.name, None if purge else str(target), mlflow, run_ids)


def empty(workspace: Workspace) -> list[str]:
    """Deletes for good what is in the trash, and returns the names; ``StorageError`` if that cannot be deleted."""
    folder = trash(workspace)
    if is_link(folder):
        raise StorageError(f"{folder} is a symbolic link, which is not followed: remove the link")
    paths = sorted(folder.iterdir()) if folder.exists() else []
    for path in paths:
        try:
            delete(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be deleted: {error.strerror or error}") from error
    return [path.name for path in paths]


def trash(workspace: Workspace) -> Path:
    """Returns the folder of removed runs."""
    return workspace.root / "trash"


def _runs_of(workspace: Workspace, folder: RunFolder) -> list[RunFolder]:
    """Returns the runs of a group of seeds."""
    record = folder.record()
    if record is None or record.kind not in GROUPS:
        return []
    return below(workspace, folder.name)


def _deleted(workspace: Workspace, record: Record | None) -> tuple[str, list[str]]:
    """Deletes a run in MLflow, and the runs below it; returns a message and their ids."""
    if record is None:
        return "unchanged in MLflow, because its run.json cannot be read", []
    if record.tracking_uri != workspace.recorded_uri(shown(workspace.tracking_uri)):
        recorded = workspace.resolved_uri(record.tracking_uri)
        return f"it stays in {recorded}; name that in MLFLOW_TRACKING_URI to delete it there", []
    store = Store(workspace)
    run_ids = store.delete_run(record.experiment, record.run_id, record.name)
    return ("deleted in MLflow" if run_ids else "MLflow lists it no more"), run_ids
