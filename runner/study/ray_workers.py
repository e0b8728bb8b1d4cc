"""Workers of a study on a Ray cluster, one in each task.

Ray places the tasks and starts them again elsewhere when a node is lost. What is searched, and that
every trial counts once, is decided by the study's storage, as for workers that are started by hand.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from runner.child.spawn import ChildError
from runner.study.local_workers import run_worker
from runner.study.record import study_record
from runner.study.store import StudyStore
from runner.system.errors import RunnerError, UsageError
from runner.system.files import make_folder, open_file
from runner.system.secrets import redact
from runner.system.shared_storage import VARIABLES, require_server
from runner.system.suggestions import shown_path
from runner.system.text_lines import amount, figures
from runner.training.signals import Stop

if TYPE_CHECKING:
    from runner.study.definition import Definition
    from runner.study.trial_run import StudyDisplay
    from runner.tracking.workspace import Workspace

# Time between two looks at the tasks and at the study.
_LOOK_SECONDS = 2.0
# A task is started again when its node is lost, but not without end when its process crashes.
_MAX_RETRIES = 10
# Time for the workers to write their checkpoints after a signal.
_END_SECONDS = 90.0


@dataclass(frozen=True)
class Resources:
    """What a worker needs of a node.

    Attributes:
        cpus: Number of cores, which are also the threads of a training.
        gpus: Number of GPUs.
    """

    cpus: int = 1
    gpus: int = 0


@dataclass(frozen=True)
class Order:
    """What a task has to know; it is sent through Ray, never written to a file.

    Attributes:
        options: Study, settings and seconds of the worker, and whether code may drift.
        files: Plugin files.
        threads: Threads of a training.
        folder: Working directory of the command.
        variables: Environment variables of the command that workers need.
        log: File to which the worker adds what it reports.
    """

    options: Mapping[str, Any]
    files: tuple[Path, ...]
    threads: int
    folder: str
    variables: Mapping[str, str]
    log: Path


def work_on_ray(
    definition: Definition,
    workspace: Workspace,
    sets: Sequence[str],
    files: Sequence[Path],
    slot: Resources,
    stop: Stop,
    display: StudyDisplay,
    allow_drift: bool = False,
) -> str:
    """Works like ``work``, with a worker in every slot of a Ray cluster.

    Args:
        definition: The study.
        workspace: Folder of trials and logs, which all nodes share.
        sets: Settings of the command line.
        files: Plugin files, at the same path on all nodes.
        slot: What each worker needs of a node.
        stop: A signal that ends the search.
        display: Shows the progress of the study.
        allow_drift: Whether trials may have other code, packages or data than earlier ones.

    Raises:
        UsageError: Ray is not installed, there is no cluster, no node has a slot, or several nodes
            would share a file of SQLite.
        RunnerError: The cluster does not answer any more, or a worker failed.
    """
    with _connected() as ray:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        slots = sum(_count_slots(node["Resources"], slot) for node in nodes)
        if not slots:
            need = amount(slot.cpus, "CPUs") + (f" and {amount(slot.gpus, 'GPUs')}" if slot.gpus else "")
            raise UsageError(f"no node of the Ray cluster has {need}; set --cpus and --gpus of a worker")
        if len(nodes) > 1:
            require_server(slots)
        workers = min(slots, definition.config.budget.trials)
        folder = workspace.root / "ray"
        make_folder(folder)
        orders = [
            Order(
                options={
                    "study": str(definition.path.absolute()),
                    "sets": list(sets),
                    "seconds": definition.config.budget.seconds,
                    "allow_drift": allow_drift,
                },
                files=tuple(path.absolute() for path in files),
                threads=slot.cpus,
                folder=str(Path.cwd()),
                variables=_variables(workspace),
                log=folder / f"{definition.config.name}-{number}.log",
            )
            for number in range(workers)
        ]
        display.say(
            f"{amount(workers, 'workers')} on {amount(len(nodes), 'nodes')} of a Ray cluster, "
            f"{amount(slot.cpus, 'CPUs')} each; their logs are in {shown_path(folder)}"
        )
        task = ray.remote(num_cpus=slot.cpus, num_gpus=slot.gpus, max_retries=_MAX_RETRIES)(work_in_task)
        with display.phase("waiting for the workers"):
            failures = _wait(ray, [task.remote(order) for order in orders], definition, workspace, stop, display)
    if failures and not stop:
        for failure in dict.fromkeys(failures):
            display.say(failure)
        raise RunnerError(f"{len(failures)} of {workers} workers failed; their messages are above")
    return "stopped by a signal" if stop else ""


def work_in_task(order: Order) -> str | None:
    """Works on a study in a Ray task; returns the message of a failure."""
    os.chdir(order.folder)
    os.environ.update(order.variables)
    descriptor = open_file(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        display = _LogDisplay(file)
        display.say(f"a worker starts on {socket.gethostname()}, process {os.getpid()}")
        stop = Stop()
        try:
            run_worker(order.options, order.files, order.threads, stop, display, interrupts=(KeyboardInterrupt,))
        except ChildError as error:
            # A worker that a signal stops ends with an error, too.
            if not stop:
                display.say(str(error))
                return f"{order.log.name}: {error}"
        display.say("the worker was stopped" if stop else "the worker ended")
    return None


class _LogDisplay:
    """Writes what stays of a worker's display to a file, with the time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, text: str) -> None:
        """Writes a line."""
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {redact(text)}\n")
        self._file.flush()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Does nothing: a log has no present."""
        return nullcontext()

    def standing(self, trials: int, seconds: float, best: Mapping[str, float]) -> None:
        """Writes the state of the study."""
        values = f"; best: {figures(best)}" if best else ""
        self.say(f"{amount(trials, 'trials')} finished, {seconds:.0f} s{values}")

    def trial(self, number: int, doing: str, figures: str = "") -> None:
        """Does nothing: the study has every trial."""


@contextmanager
def _connected() -> Iterator[Any]:
    """Connects to the Ray cluster inside the ``with``; yields the module ``ray``."""
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise UsageError("--on ray needs Ray: pip install 'proven-runner[ray]'") from None
    address = os.environ.get("RAY_ADDRESS", "auto")
    # Ray replaces them, and a study ends at a signal.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        reason = redact(str(error)).partition("\n")[0]
        raise UsageError(
            f"no Ray cluster answers at {address}: {reason}; start one with: ray start --head, "
            "or name it in RAY_ADDRESS"
        ) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield ray
    except RayError as error:
        reason = redact(str(error)).partition("\n")[0]
        raise RunnerError(f"the Ray cluster does not answer: {reason}; the same command continues") from error
    finally:
        ray.shutdown()


def _count_slots(resources: Mapping[str, float], slot: Resources) -> int:
    """Returns how many workers a node has room for."""
    counts = [int(resources.get("CPU", 0)) // slot.cpus]
    if slot.gpus:
        counts.append(int(resources.get("GPU", 0)) // slot.gpus)
    return min(counts)


def _variables(workspace: Workspace) -> dict[str, str]:
    """Returns the environment variables that a worker needs, those with secrets included."""
    values = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return {**values, "RUNNER_WORKSPACE": str(workspace.root.absolute())}


def _wait(
    ray: Any,
    pending: Sequence[Any],
    definition: Definition,
    workspace: Workspace,
    stop: Stop,
    display: StudyDisplay,
) -> list[str]:
    """Waits for all tasks and shows the study meanwhile; returns the messages of failures."""
    failures: list[str] = []
    deadline = 0.0
    while pending:
        ended, pending = ray.wait(pending, timeout=_LOOK_SECONDS)
        failures += filter(None, (_failure(ray, task) for task in ended))
        _show(definition, workspace, display)
        if stop and not deadline:
            deadline = time.monotonic() + _END_SECONDS
            for task in pending:
                ray.cancel(task)
        if deadline and time.monotonic() > deadline:
            display.say(f"{amount(len(pending), 'workers')} did not end within {_END_SECONDS:.0f} s of the signal")
            break
    return failures


def _failure(ray: Any, task: Any) -> str | None:
    """Returns why a task has failed; None if it has not, or was cancelled."""
    from ray.exceptions import RayError, TaskCancelledError

    try:
        message: str | None = ray.get(task)
    except TaskCancelledError:
        return None
    except RayError as error:
        lines = redact(str(error)).strip().splitlines()
        return lines[-1] if lines else type(error).__name__
    return message


def _show(definition: Definition, workspace: Workspace, display: StudyDisplay) -> None:
    """Shows the state of the study, as soon as a worker has created it."""
    with suppress(UsageError), StudyStore.session(workspace) as store:
        study = store.find(definition.config.name)
        record = study_record(definition.config.name, definition, study, workspace, "RUNNING")
        display.standing(record.step, record.seconds, record.metrics)
