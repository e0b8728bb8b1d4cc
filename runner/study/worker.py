"""A worker takes trials from the study's queue, one after the other, until the budget is spent."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Event

from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from runner.study.attempts import Attempts, used
from runner.study.definition import Definition
from runner.study.leases import BEAT_SECONDS, DEAD_SECONDS, Lease, Leases
from runner.study.publish import Publisher
from runner.study.store import StudyStore
from runner.study.trial import LostError, Say, StoppedError, TrialRun
from runner.system.faults import reach
from runner.tracking import Workspace
from runner.tracking.periodic import Periodic
from runner.tracking.store import Store
from runner.train.signals import Stop

BEGINNING, REPORT = -2, -3
"""The leases of whoever makes the study, and of whoever writes its report."""
_SHARED = Path("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())  # noqa: S108 (a lock, not data)
_WAIT_SECONDS = 1.0
"""Between two looks whether a trial of another worker has become free."""


class Worker:
    """Works on one study.

    Args:
        definition: the study's.
        workspace: where the trials' folders are, and MLflow's database.
        plugin_files: local plugin files that the recipe needs.
        stop: becomes true when the worker is told to end.
        say: shows progress.
        dead_seconds: how long a worker elsewhere may be silent.

    Raises:
        StorageError: the study's storage or MLflow cannot be reached.
        UsageError: the storage has a study of that name with another definition.
    """

    def __init__(
        self,
        definition: Definition,
        workspace: Workspace,
        plugin_files: Sequence[Path],
        stop: Stop,
        say: Say,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        config = definition.config
        self._definition, self._files, self._stop, self._say = definition, plugin_files, stop, say
        self._store = StudyStore.open(workspace)
        self._budget, self._dead_seconds = config.budget, dead_seconds
        self.folder = workspace.root / "studies" / config.name
        self.folder.mkdir(parents=True, exist_ok=True)
        tracking = Store.open(workspace)
        self.leases = Leases(self._store.url, config.name, dead_seconds)
        with self.leases.waiting(BEGINNING):
            self.study: Study = self._store.create(definition)
            self.publisher = Publisher(tracking, definition.recipe.tracking.experiment, self.study)
            self.publisher.begin(definition)
        self._store.top_up(self.study, definition, self.leases)
        self.publisher.catch_up(self.folder / "trials")
        # Trials that are timed wait for each other on one machine, whatever study they belong to.
        self._alone = FileLock(_SHARED / f"runner-timing-{os.getuid()}.lock") if config.timed else None

    def run(self) -> str:
        """Works until there is nothing left to do.

        Returns:
            Why it ended: empty if all trials are finished.

        Raises:
            StorageError: the storage went away.
            UsageError: the study asks for what no training logs.
        """
        while not self._stop:
            with _Turn(self._alone, self._stop, self._say) as mine:
                ended, took = self._look_for_one() if mine else (None, False)
            if ended is not None:
                return ended
            if not took:
                time.sleep(_WAIT_SECONDS)
        return "it was told to end"

    def close(self) -> None:
        """Closes the connections."""
        self.leases.close()
        self._store.close()

    def _look_for_one(self) -> tuple[str | None, bool]:
        """Takes one trial to its end, if one is free.

        Returns:
            Why there is nothing more to do, None if there is; and whether there was a trial.
        """
        trials, leases = self.study.get_trials(deepcopy=False), self.leases.all()
        unfinished = [trial for trial in trials[: self._budget.trials] if not trial.state.is_finished()]
        if not unfinished:
            return "", False
        spent = used(trials, leases).exhausted(self._budget)
        begun = [trial for trial in unfinished if trial.state == TrialState.RUNNING]
        # What has begun comes first: to be ended when the budget is spent, and for the next suggestion to know of it.
        others = [lease for lease in leases if lease.trial >= 0 and not self.leases.is_dead(lease)]
        doubtful = not all(self.leases.is_alive(lease) for lease in others)
        took = any(self._take(trial) for trial in (begun if spent or doubtful else unfinished))
        return (f"the budget of {spent} is spent" if spent and not took else None), took

    def _take(self, waiting: FrozenTrial) -> bool:
        """Brings a trial to its end if it is free; whether it was."""
        number = waiting.number
        before = self.leases.holder(number)
        if not self.leases.claim(number):
            return False
        reach("study.claimed")
        lost, heard = Event(), time.monotonic()

        def beat() -> None:
            nonlocal heard
            if time.monotonic() - heard > self._dead_seconds / 2:  # others may take this one for dead soon
                lost.set()
            if not self.leases.beat(number):
                lost.set()
            heard = time.monotonic()

        beating = Periodic("lease", BEAT_SECONDS, beat)
        try:
            if not self.study.get_trials(deepcopy=False)[number].state.is_finished():
                self._bring_to_end(number, before, lost)
        except (LostError, StoppedError) as error:
            self._say(str(error))
        except UpdateFinishedTrialError:
            self._say(f"trial {number} was ended by another worker")
        finally:
            beating.stop()
            self.leases.release(number)
        return True

    def _bring_to_end(self, number: int, before: Lease | None, lost: Event) -> None:
        trial = self._store.trial(self.study, number)
        reach("study.begun")
        if before is not None:
            self._say(f"trial {number} goes on: its worker, process {before.pid}, is gone")
        Attempts(trial).close(before.seen if before is not None else 0.0)
        TrialRun(
            self._definition, trial, self.folder / "trials" / f"{number:04d}", self.publisher, self._files,
            lambda: bool(self._stop), lost.is_set, self._say,
        ).run()  # fmt: skip


class _Turn:
    """Waits until no other worker of this machine times a trial."""

    def __init__(self, lock: FileLock | None, stop: Stop, say: Say) -> None:
        self._lock, self._stop, self._say = lock or nullcontext(), stop, say

    def __enter__(self) -> bool:
        if not isinstance(self._lock, FileLock):
            return True
        said = False
        while not self._stop:
            try:
                self._lock.acquire(timeout=_WAIT_SECONDS)
            except Timeout:
                if not said:
                    self._say("another worker of this machine measures; trials that are timed take turns")
                said = True
            else:
                return True
        return False

    def __exit__(self, *_: object) -> None:
        if isinstance(self._lock, FileLock):
            self._lock.release()
