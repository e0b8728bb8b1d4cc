"""Several workers of a study on one machine, each in a separate process, displayed as one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.child.protocol import Parent
from runner.child.spawn import Child, ChildError, Limits
from runner.plugin.registry import Registry
from runner.system.errors import RunnerError
from runner.system.hardware import usable_cores
from runner.system.text_lines import amount
from runner.tracking.workspace import Workspace
from runner.training.signals import Stop, stop_on_signals

if TYPE_CHECKING:
    from runner.study.definition import Definition
    from runner.study.trial_run import StudyDisplay

# Time for local workers to write their checkpoints.
_END_SECONDS = 60.0


def work_together(
    definition: Definition,
    sets: Sequence[str],
    files: Sequence[Path],
    stop: Stop,
    display: StudyDisplay,
    allow_drift: bool = False,
) -> str:
    """Works like ``work``, with as many local workers as the budget has; ``sets``
    are those of the command line.
    """
    parallel = definition.config.budget.parallel
    threads = _threads_per_worker(parallel)
    display.say(f"{parallel} workers with {amount(threads, 'threads')} each")
    options = {
        "study": str(definition.path),
        "sets": list(sets),
        "seconds": definition.config.budget.seconds,
        "allow_drift": allow_drift,
    }

    def run_one(_number: int) -> ChildError | None:
        try:
            run_worker(options, files, threads, stop, display)
        except ChildError as error:
            display.say(str(error))
            return error
        return None

    with display.phase("waiting for the workers"), ThreadPoolExecutor(parallel) as pool:
        errors = [error for error in pool.map(run_one, range(parallel)) if error is not None]
    if errors and not stop:
        summary = RunnerError(f"{len(errors)} of {parallel} workers failed; their messages are above")
        summary.exit_code = errors[0].exit_code
        raise summary
    return "stopped by a signal" if stop else ""


def run_worker(
    options: Mapping[str, Any],
    files: Sequence[Path],
    threads: int,
    stop: Stop,
    display: StudyDisplay,
    interrupts: tuple[type[BaseException], ...] = (),
) -> None:
    """Runs a worker in a process of its own until it ends.

    Args:
        options: Study, settings, seconds, and whether code may drift.
        files: Plugin files.
        threads: Threads of a training.
        stop: A signal that ends the worker.
        display: Shows what the worker reports.
        interrupts: Exceptions that stop the worker like a signal, wherever they are raised.

    Raises:
        ChildError: The worker failed.
    """
    child = Child(
        __name__,
        plugin_files=files,
        options=options,
        limits=Limits(grace=_END_SECONDS),
        threads=threads,
    )
    with child:
        while True:
            try:
                _forward_display(child, stop, display)
            except interrupts:
                stop.received = signal.SIGTERM
            else:
                return


def _threads_per_worker(parallel: int) -> int:
    # A number that the user has set counts for every worker.
    configured_threads = os.environ.get("OMP_NUM_THREADS", "")
    if configured_threads.isdecimal():
        return int(configured_threads)
    return max(1, usable_cores() // parallel)


def _forward_display(child: Child, stop: Stop, display: StudyDisplay) -> None:
    """Calls the display with the messages of a worker until it ends: a message maps methods to arguments."""
    while (message := child.receive(stop.__bool__)) is not None:
        for method, arguments in message.items():
            getattr(display, method)(*arguments)


class _Forwarding:
    """Displays nothing, and sends the display to the parent."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent

    def say(self, text: str) -> None:
        """A line that stays."""
        self._parent.tell(say=[text])

    def phase(self, _name: str) -> AbstractContextManager[None]:
        """Does nothing: there are other workers."""
        return nullcontext()

    def standing(self, trials: int, seconds: float, best: Mapping[str, float]) -> None:
        """Sends the state of the study."""
        self._parent.tell(standing=[trials, seconds, dict(best)])

    def trial(self, number: int, doing: str, figures: str = "") -> None:
        """Sends the state of a trial."""
        self._parent.tell(trial=[number, doing, figures])


def main(parent: Parent) -> None:
    """Runs one of several workers of this machine."""
    from runner.study.definition import load_study
    from runner.study.worker import work

    registry = Registry(parent.plugin_files)
    options = parent.options
    definition = load_study(options["study"], options["sets"], registry, options["seconds"])
    with stop_on_signals() as stop:
        work(definition, Workspace(), registry.files, stop, _Forwarding(parent), options["allow_drift"])
