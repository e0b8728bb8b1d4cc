"""Completes runs whose process is dead: sets their final status, and sends the
missing records to MLflow.
"""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

from runner.system.errors import StorageError, UsageError
from runner.system.files import write_durably
from runner.system.workspace_paths import RECORD
from runner.tracking.lookup import folders
from runner.tracking.record import GROUPS
from runner.tracking.spool import Shipper, Spool, lines, offset_file, reached
from runner.tracking.store import Store, shown
from runner.tracking.workspace import GLANCE_SECONDS, RunFolder, Workspace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delivery:
    """The result of sending a run's records."""

    run: str
    sent_bytes: int = 0
    problem: str = ""
    """Why they were not sent."""
    alive: bool = False
    """Whether the run's process will send them."""


def reap(workspace: Workspace, telling: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[str]:
    """Sets the final status of runs whose process died, KILLED unless it had written another one,
    and returns their names.

    MLflow learns of it now if it answers, else with the next ``sync``; ``telling`` is entered around that.
    """
    run_folders = folders(workspace.runs)
    for folder in run_folders:
        if folder.record() is None:
            _log.warning("%s is not a record of a run: %s", folder.path / RECORD, folder.record_problem())
    dead = [folder for folder in run_folders if _set_end(folder)]
    if dead:
        try:
            with telling():
                deliver(workspace, dead)
        except StorageError as error:
            _log.warning("the end of %d dead runs is not in MLflow yet: %s", len(dead), error)
    return [folder.name for folder in dead]


def deliver(workspace: Workspace, runs: list[RunFolder]) -> list[Delivery]:
    """Sends missing records of runs whose process is dead to MLflow; a repetition
    changes nothing. Raises ``StorageError``.
    """
    # Opened only if a run needs it.
    store = cache(partial(Store, workspace))
    return [_deliver(folder, workspace, store) for folder in runs]


def _set_end(folder: RunFolder) -> bool:
    """Returns False if the run has ended, is alive or is resumed in the meantime,
    or if the disk refuses the record.
    """
    record = folder.record()
    if record is None or record.status != "RUNNING" or folder.alive():
        return False
    try:
        folder.claim(GLANCE_SECONDS)
        record = folder.record()
        if record is None or record.status != "RUNNING":
            return False
        folder.use_reserve()
        # The spool may have newer values than the record: the last ones of its process.
        status = None
        error_text = ""
        metrics = dict(record.metrics)
        for line, _ in lines(folder.spool):
            status = line.status or status
            error_text = line.tags.get("error", error_text)
            metrics |= line.metrics
        reason = error_text if status == "FAILED" else ""
        if status is None or status == "RUNNING":
            status = "KILLED"
            reason = "its process died"
            _append_status(folder, status, record.heartbeat)
        changes = {"status": status, "reason": reason, "metrics": metrics}
        folder.write(record.model_copy(update=changes))
    except UsageError:
        return False
    except StorageError as error:
        _log.warning("%s", error)
        return False
    except OSError as error:
        cause = error.strerror or error
        _log.warning("%s: its process is dead, which cannot be written there: %s", folder.path, cause)
        return False
    finally:
        folder.release()
    return True


def _append_status(folder: RunFolder, status: str, seconds: float) -> None:
    """Adds a status to the spool of a run, at a time in seconds since 1970; an ``OSError`` if the disk refuses it."""
    spool = Spool(folder.spool)
    spool.append(t=int(seconds * 1e3), status=status)
    if not spool.close():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _deliver(folder: RunFolder, workspace: Workspace, store: Callable[[], Store]) -> Delivery:
    record = folder.record()
    if record is None:
        return Delivery(folder.name, problem="its run.json cannot be read")
    if record.tracking_uri != workspace.recorded_uri(shown(workspace.tracking_uri)):
        recorded = workspace.resolved_uri(record.tracking_uri)
        return Delivery(folder.name, problem=f"it is kept in {recorded}; name that in MLFLOW_TRACKING_URI")
    # The process of a group holds no lock.
    if folder.alive() or (record.kind in GROUPS and record.at_work):
        return Delivery(folder.name, alive=True)
    # A group of an earlier version has sent its results without a spool.
    if not folder.spool.exists():
        return Delivery(folder.name)
    mlflow = store()
    try:
        folder.claim(GLANCE_SECONDS)
        run_id = record.run_id or mlflow.run_named(mlflow.experiment(record.experiment), record.name)
        if run_id is None:
            # It died before it had a run in MLflow, so nothing is missing.
            write_durably(offset_file(folder.spool), str(folder.spool.stat().st_size))
            return Delivery(folder.name)
        if record.run_id is None:
            folder.take_name(record, run_id)
        if not reached(folder.spool):
            # Its process may have died before it could.
            mlflow.rename_run(run_id, folder.name)
        shipper = Shipper(mlflow, run_id, folder.spool)
        pending = shipper.pending
        shipper.ship()
        return Delivery(folder.name, pending - shipper.pending)
    except UsageError:  # it was resumed
        return Delivery(folder.name, alive=True)
    except Exception as error:  # MLflow raises whatever its database and network drivers raise
        return Delivery(folder.name, problem=str(error).partition("\n")[0])
    finally:
        folder.release()
