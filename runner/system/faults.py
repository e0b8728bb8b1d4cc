"""Named places at which a test can make this process fail; without ``RUNNER_FAULTS`` they do nothing."""

import errno
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runner.system.errors import UsageError

VARIABLE = "RUNNER_FAULTS"
POINTS = (
    "start.folder",  # the run's folder exists, but no run in MLflow
    "start.tracked",  # MLflow has the run, but its folder does not contain the id yet
    "start.named",  # the folder's record has MLflow's id, the folder is not named after it yet
    # A file is replaced, and the manifest has its old digest in addition to the new one.
    "manifest.replaced",
    "start.locked",  # the lock is written, training has not started
    "tuning.stored",  # the lock has a tuning choice of the update that has just ended
    "resume.loaded",  # the state is restored, training has not started
    "spool.append",  # a line has been written
    "spool.sync",  # before the lines are made durable
    "ship.sent",  # MLflow has a batch, the place reached is not written yet
    "ship.placed",  # the place reached is written
    "checkpoint.begin",  # the temporary folder exists
    "checkpoint.tensors",  # a file of tensors has been written
    "checkpoint.segment",  # rows of a ring buffer have been written
    "checkpoint.state",  # everything but tensors has been written
    "checkpoint.manifest",  # the manifest has been written
    "checkpoint.synced",  # all is durable, but does not bear its name yet
    "checkpoint.renamed",  # all is durable and bears its name, older ones are not pruned yet
    "checkpoint.pruned",
    "run.tested",  # the test metrics are logged, the run has no final status yet
    "study.claimed",  # a worker holds a trial that has not started
    "study.begun",  # Optuna has the trial as running, nothing is suggested
    "study.suggested",  # all settings are suggested, nothing is trained
    "study.judged",  # the pruner has judged a value, and the training does not know it yet
    "study.trained",  # the trial is trained, and has no result
    "study.told",  # the trial has a result, the lease is still held
)
ACTIONS = ("kill", "raise", "enospc", "torn")
_SPEC = re.compile(rf"({'|'.join(map(re.escape, POINTS))})=({'|'.join(ACTIONS)})(?:@(\d+)(\+?))?")


class _Fault(NamedTuple):
    action: str
    failing_visits: range
    visits: Iterator[int]  # counted from 1


def parse(text: str) -> dict[str, _Fault]:
    """Reads ``point=action[@visit[+]]``, separated by commas: ``checkpoint.synced=kill@2,spool.append=enospc@5+``.

    ``kill`` is SIGKILL; ``raise`` an ``OSError`` for a failing disk; ``enospc`` one for a full disk; ``torn`` cuts the
    file that has just been written in half, then SIGKILL. A ``UsageError`` if a point or an action does not exist.
    """
    faults = {}
    for spec in filter(None, text.split(",")):
        match = _SPEC.fullmatch(spec.strip())
        if match is None:
            raise UsageError(
                f"{VARIABLE}: '{spec}' is not POINT=ACTION[@VISIT[+]]; points: {', '.join(POINTS)}; "
                f"actions: {', '.join(ACTIONS)}"
            )
        point, action, at, onwards = match.groups()
        first = int(at or 1)
        end = sys.maxsize if onwards else first + 1
        faults[point] = _Fault(action, range(first, end), itertools.count(1))
    return faults


_armed = parse(os.environ.get(VARIABLE, ""))


def reach(point: str, path: Path | None = None, last: int | None = None) -> None:
    """Passes one of ``POINTS``; fails there if a test wants it.

    For ``torn``, ``path`` is the file that has just been written, and ``last`` how many of its bytes, if not all.
    """
    fault = _armed.get(point)
    if fault is None or next(fault.visits) not in fault.failing_visits:
        return
    if fault.action in ("raise", "enospc"):
        code = errno.EIO if fault.action == "raise" else errno.ENOSPC
        raise OSError(code, os.strerror(code))
    if fault.action == "torn" and path is not None:
        size = path.stat().st_size
        written = size if last is None else last
        os.truncate(path, size - written // 2)
    os.kill(os.getpid(), signal.SIGKILL)
