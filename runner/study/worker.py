"""A worker takes trials from the study's queue to their end, one after the other, until the budget is spent."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Literal

from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from runner.study.attempts import Used
from runner.study.definition import Definition
from runner.study.leases import BEAT_SECONDS, DEAD_SECONDS, Lease, Leases
from runner.study.publish import Publisher
from runner.study.record import study_record
from runner.study.report import write_report
from runner.study.store import StudyStore
from runner.study.summary import summarise
from runner.study.trial_run import StudyDisplay, TrialRun, TrialStoppedError, WorkerContext
from runner.system.errors import RunnerError
from runner.system.faults import reach
from runner.system.files import make_folder
from runner.tracking.periodic import Periodic
from runner.tracking.record import Status
from runner.tracking.store import Store
from runner.tracking.workspace import RunFolder, Workspace
from runner.training.signals import Stop

# The lease for creating the study; trials have numbers from 0.
CREATING = -2
# The lease for writing its report.
REPORTING = -3
_SHARED = Path("/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir())  # noqa: S108 (a lock, not data)
# Time between two checks whether a trial of another worker has become free.
_WAIT_SECONDS = 1.0


def work(
    definition: Definition,
    here: Workspace,
    files: Sequence[Path],
    stop: Stop,
    display: StudyDisplay,
    allow_drift: bool = False,
) -> str:
    """Works on a study, writes its report, and returns why it ended before all trials, or "".

    With ``allow_drift``, its trials may have other code, packages or data than earlier ones.

    Raises:
        StorageError: The study's storage or MLflow cannot be reached.
        UsageError: The study was created with another definition, its code, packages or data have
            changed, or no training logs a metric.
    """
    with StudyStore.session(here) as store:
        with display.phase("opening the study"):
            worker = _Worker(definition, here, store, files, stop, display, allow_drift)
        try:
            with display.phase("looking for a trial"):
                reason = worker.run()
        except RunnerError:
            worker.conclude()
            raise
        worker.conclude()
        return reason


class _Worker:
    """Works on one study; raises what ``work`` does."""

    def __init__(
        self,
        definition: Definition,
        workspace: Workspace,
        store: StudyStore,
        plugin_files: Sequence[Path],
        stop: Stop,
        display: StudyDisplay,
        allow_drift: bool,
    ) -> None:
        config = definition.config
        self._definition = definition
        self._workspace = workspace
        self._store = store
        self._stop = stop
        self._display = display
        self._leases = Leases(store.engine, config.name)
        self._folder = workspace.studies / config.name
        make_folder(self._folder)

        tracking = Store(workspace)
        with self._leases.waiting(CREATING):
            self._study = store.create(definition, allow_drift)
            self._publisher = Publisher(tracking, self._study, definition)
        store.top_up(self._study, definition, self._leases)
        trials_folder = self._folder / "trials"
        self._publisher.catch_up(trials_folder)
        self._note("RUNNING")

        # Trials that are timed wait for each other on one machine, whatever study they belong to.
        timing_lock = _SHARED / f"runner-timing-{os.getuid()}.lock"
        self._timing_lock = FileLock(timing_lock) if config.timed else None
        self._context = WorkerContext(
            definition=definition,
            publisher=self._publisher,
            plugin_files=plugin_files,
            stop=stop,
            display=display,
            trials_folder=trials_folder,
            computation=definition.computation(),
            allow_drift=allow_drift,
        )

    def run(self) -> str:
        """Works until all trials are finished; returns the reason of an earlier end."""
        while not self._stop:
            with self._exclusive_timing() as may_work:
                reason, has_worked = self._work_on_free_trials() if may_work else (None, False)
            if reason is not None:
                return reason
            if not has_worked:
                time.sleep(_WAIT_SECONDS)
        return "stopped by a signal"

    def conclude(self) -> None:
        """Writes the present report, and sends it to MLflow."""
        with self._display.phase("writing the report"), self._leases.waiting(REPORTING):
            summary = summarise(self._study, dashboard=self._store.dashboard)
            files = write_report(summary, self._folder)
            status: Status = "STOPPED" if self._stop else "FINISHED"
            self._publisher.end(status, summary, files)
            self._note(status)

    def _note(self, status: Literal["RUNNING"] | Status) -> None:
        """Updates the display of the study, and its record unless the disk refuses."""
        record = study_record(self._folder.name, self._definition, self._study, self._workspace, status)
        self._display.standing(record.step, record.seconds, record.metrics)
        with suppress(OSError):
            RunFolder(self._folder).write(record)

    @contextmanager
    def _exclusive_timing(self) -> Iterator[bool]:
        """Waits until no other local worker measures a trial; yields False if stopped before."""
        lock = self._timing_lock
        if lock is None:
            yield not self._stop
            return

        with suppress(Timeout):
            lock.acquire(blocking=False)
        if not lock.is_locked:
            self._display.say("another worker of this machine measures; trials that are timed take turns")
        while not lock.is_locked and not self._stop:
            # A short timeout, so that a signal is noticed.
            with suppress(Timeout):
                lock.acquire(timeout=_WAIT_SECONDS)
        try:
            yield not self._stop
        finally:
            lock.release()

    def _work_on_free_trials(self) -> tuple[str | None, bool]:
        """Brings free trials to their end.

        Returns:
            Why no work remains, or None if some does; and whether a trial was free.
        """
        budget = self._definition.config.budget
        leases = self._leases.all()
        trials = self._study.get_trials(deepcopy=False)
        unfinished = [trial for trial in trials[: budget.trials] if not trial.state.is_finished()]
        if not unfinished:
            return "", False

        spent_budget = self._spent_budget(Used.by(trials, leases))
        # Started trials come first: the budget may end them, and suggestions need their results.
        if spent_budget or self._has_uncertain_holder(leases):
            unfinished = [trial for trial in unfinished if trial.state == TrialState.RUNNING]
        has_worked = any(map(self._work_on, unfinished))
        if spent_budget and not has_worked:
            return f"the budget of {spent_budget} is spent", False
        return None, has_worked

    def _spent_budget(self, used: Used) -> str:
        """Returns the limit of the budget that is reached; empty if none is."""
        budget = self._definition.config.budget
        if used.seconds >= (budget.seconds or math.inf):
            return f"{budget.seconds:g} s of trials"
        if used.device_seconds >= (budget.device_seconds or math.inf):
            return f"{budget.device_seconds:g} s on devices"
        return ""

    def _has_uncertain_holder(self, leases: Sequence[Lease]) -> bool:
        """Returns whether a trial may have lost its worker, which only time will show."""
        states = [self._leases.alive(lease) for lease in leases if lease.trial >= 0]
        return None in states

    def _work_on(self, waiting: FrozenTrial) -> bool:
        """Brings a trial to its end if it is free; returns whether it was."""
        number = waiting.number
        previous_holder = self._leases.holder(number)
        if not self._leases.claim(number):
            return False
        reach("study.claimed")
        lost = Event()
        beating = Periodic("lease", BEAT_SECONDS, self._heartbeat(number, lost))
        try:
            if not self._study.get_trials(deepcopy=False)[number].state.is_finished():
                trial = self._store.trial(self._study, number)
                reach("study.begun")
                last_seen = 0.0
                if previous_holder is not None:
                    last_seen = previous_holder.seen
                    self._display.say(f"trial {number} continues: its worker, process {previous_holder.pid}, is gone")
                TrialRun(self._context, trial, last_seen, lost).run()
        except TrialStoppedError as error:
            self._display.say(str(error))
        except UpdateFinishedTrialError:
            self._display.say(f"trial {number} was ended by another worker")
        finally:
            beating.stop()
            self._display.trial(number, "")
            self._leases.release(number)
        self._note("RUNNING")
        return True

    def _heartbeat(self, number: int, lost: Event) -> Callable[[], None]:
        """Returns a function that writes a heartbeat, and sets the event if the trial is lost."""
        last_beat = time.monotonic()

        def beat() -> None:
            nonlocal last_beat
            # After a long pause of this machine, others may take this worker for dead soon.
            is_late = time.monotonic() - last_beat > DEAD_SECONDS / 2
            if is_late or not self._leases.beat(number):
                lost.set()
            last_beat = time.monotonic()

        return beat
