"""Finds the folders of a workspace's runs: all of them, by name, or by group."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from runner.system.errors import UsageError
from runner.system.files import is_link
from runner.system.workspace_paths import LOCK_NAME, RECORD, VARIABLE
from runner.tracking.record import STALE_SECONDS
from runner.tracking.workspace import RunFolder, Workspace

_SHOWN_RUNS = 8
_log = logging.getLogger(__name__)


def folders(*parents: Path) -> list[RunFolder]:
    """Returns all runs in these folders of a workspace, the newest first."""
    run_folders = [RunFolder(path) for parent in parents for path in _with_records(parent)]
    return sorted(run_folders, key=_start_and_name, reverse=True)


def _start_and_name(folder: RunFolder) -> tuple[float, str]:
    record = folder.record()
    return (record.started if record else 0.0), folder.name


def _with_records(parent: Path) -> Iterator[Path]:
    """Yields the folders in a folder of a workspace that have a record; links are not followed."""
    if is_link(parent):
        _warn_of_link(parent)
        return
    try:
        entries = list(os.scandir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        path = parent / entry.name
        if entry.is_symlink():
            _warn_of_link(path)
        elif os.path.lexists(path / RECORD):
            yield path


@cache
def _warn_of_link(path: Path) -> None:
    """Warns once of a link in a workspace."""
    hint = f"to keep runs on another disk, name a workspace there in {VARIABLE}"
    _log.warning("%s is a symbolic link, which is not followed: move its target there; %s", path, hint)


def computing(workspace: Workspace) -> int:
    """Number of other processes on this machine that compute a run, an ablation or a study."""
    count = 0
    # The runs of a group of seeds count by themselves.
    for parent in (workspace.runs, workspace.ablations, workspace.studies):
        for path in _recent(parent):
            record = RunFolder(path).record()
            if record is not None and record.owner.here and record.owner.pid != os.getpid():
                count += record.at_work
    return count


def _recent(parent: Path) -> Iterator[Path]:
    """Yields the folders whose record may belong to a living process."""
    for path in _with_records(parent):
        with suppress(OSError):
            if time.time() - (path / RECORD).stat().st_mtime < STALE_SECONDS:
                yield path


def below(workspace: Workspace, group: str) -> list[RunFolder]:
    """The runs of a group of seeds, the newest first."""
    members = []
    for folder in folders(workspace.runs):
        record = folder.record()
        if record is not None and record.group == group:
            members.append(folder)
    return members


def find(runs: Path, reference: str, *parents: Path) -> RunFolder:
    """The run of a workspace that a reference selects, as ``pick`` understands it; or a folder in the other parents."""
    run_folders = folders(runs, *parents)
    names = []
    for folder in run_folders:
        record = folder.record()
        names.append((folder.name, record.run_id if record else None))
    return run_folders[pick(reference, names, str(runs))]


def pick(reference: str, runs: Sequence[tuple[str, str | None]], where: str) -> int:
    """Returns the index of the run that a reference selects; the runs are pairs of name and
    MLflow's id, the newest first.

    The reference is a name, the digits at its end, an id, the beginning of any of them, or ``latest``. A ``UsageError``
    if no run fits, or several do.
    """
    if not runs:
        raise UsageError(f"no runs yet in {where}; start one: runner run marl_phase2")
    if reference == "latest":
        return 0
    matches = [number for number, run in enumerate(runs) if reference in run]
    if reference and not matches:
        matches = [number for number, (name, run_id) in enumerate(runs) if _starts_with(reference, name, run_id)]
    if len(matches) == 1:
        return matches[0]
    names = [runs[number][0] for number in matches or range(len(runs))]
    shown_names = ", ".join(names[:_SHOWN_RUNS])
    if len(names) > _SHOWN_RUNS:
        shown_names += ", ..."
    if matches:
        raise UsageError(f"'{reference}' matches {len(matches)} runs: {shown_names}")
    raise UsageError(f"no run '{reference}' in {where}; there are: {shown_names}")


def _starts_with(reference: str, name: str, run_id: str | None) -> bool:
    """Returns whether a name, the digits at its end or an id starts with the reference."""
    digits = name.rpartition("-")[2]
    return any(text.startswith(reference) for text in (name, digits, run_id or name))


def folder_of(run: Path | str) -> RunFolder:
    """The folder of a run: the path of one, or what ``find`` understands in this workspace."""
    path = Path(run).resolve()
    if (path / LOCK_NAME).exists():
        return RunFolder(path)
    return find(Workspace().runs, str(run))
