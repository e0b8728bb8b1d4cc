"""Membership of this process in a group that torch's launcher has started."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.distributed.process_group import (
    LAUNCH_FOLDER,
    MissingPeerError,
    PeerError,
    ProcessGroup,
    record_failure,
)

EXIT_FILE = "exit_code"
"""Exit code of the first process of a machine, in its launcher's folder."""
STARTED_FILE = "started"
"""Exists in a launcher's folder as soon as one of its processes has started."""
_LOOK_SECONDS = 0.5
_current: ProcessGroup | None = None


def current() -> ProcessGroup | None:
    """Returns the group of this process; None if it trains alone."""
    return _current


def is_member(environment: Mapping[str, str]) -> bool:
    """Returns whether a launcher has started this process as one of several."""
    return "RANK" in environment and int(environment.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """Makes this process a member of its group inside the ``with``.

    Only the first process prints, and of all errors only the first one is printed. The process
    ends like after SIGTERM if its launcher is gone.

    Raises:
        PeerError: Another process has failed before this one.
    """
    global _current
    if LAUNCH_FOLDER in os.environ:
        Path(os.environ[LAUNCH_FOLDER], STARTED_FILE).touch()
    group = _from_environment()
    stdout = sys.stdout
    stderr = sys.stderr
    # A stream that is never closed: exit functions of libraries may still write to it.
    silent = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if group.rank:
        sys.stdout = silent
        sys.stderr = silent
    threading.Thread(target=_watch_launcher, name="runner-launcher", daemon=True).start()
    _current = group
    try:
        yield group
    except PeerError as error:
        sys.stderr = silent
        # The launcher of another machine than that of the failure needs its exit code, too.
        record_failure(error.failure)
        raise
    except BaseException as error:
        failure = group.claim_failure(error)
        if failure is not None:
            sys.stderr = silent
            raise PeerError(failure) from error
        # The launcher reports the signal by which a process was killed.
        is_reported = isinstance(error, MissingPeerError) and LAUNCH_FOLDER in os.environ
        sys.stderr = silent if is_reported else stderr
        raise
    finally:
        _current = None
        sys.stdout = stdout


@contextmanager
def connected(place: Mapping[str, Any], device: str, timeout_s: float | None = None) -> Iterator[ProcessGroup | None]:
    """Connects a child process to the others of its group inside the ``with``; None for a single one.

    Args:
        place: Its ``rank``, their ``count``, and the path of their ``store``.
        device: The recipe's device.
        timeout_s: Time in which all processes must take part in an operation.

    Raises:
        PeerError: Another process has failed before this one.
    """
    count = place["count"]
    if count == 1:
        yield None
        return
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    # Its failures are those of a trial, not of the training whose launcher may have the variable.
    os.environ.pop(LAUNCH_FOLDER, None)
    rank = place["rank"]
    group = ProcessGroup(FileStore(place["store"], count), rank, count, rank)
    is_on_cpu = device == "cpu" or not torch.cuda.is_available()
    try:
        group.connect("cpu" if is_on_cpu else "cuda", timeout_s)
        yield group
    except PeerError:
        raise
    except BaseException as error:
        failure = group.claim_failure(error)
        if failure is not None:
            raise PeerError(failure) from error
        raise


def record_exit(group: ProcessGroup, code: int) -> None:
    """Leaves the exit code of a machine's first process to its launcher, if that is the runner's."""
    folder = os.environ.get(LAUNCH_FOLDER)
    if folder is not None and not group.local_rank:
        Path(folder, EXIT_FILE).write_text(str(code), encoding="utf-8")


def _from_environment() -> ProcessGroup:
    """Returns the group that the variables of torch's launcher describe."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(rendezvous("env://"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    return ProcessGroup(store, rank, count, local_rank, local_count)


def _watch_launcher() -> None:
    """Stops this process when its launcher has ended without stopping it."""
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
