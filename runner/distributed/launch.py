"""Starts a command in several processes by torch's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from runner.distributed.membership import EXIT_FILE, STARTED_FILE
from runner.distributed.process_group import FAILURE_FILE, LAUNCH_FOLDER, PeerFailure
from runner.system.errors import ExitCode, RunnerError
from runner.system.hardware import usable_cores
from runner.system.processor import thread_variables
from runner.system.terminal import print_error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousError


_SHUTDOWN_SECONDS = 110
"""Time for the current update and a checkpoint after a signal; schedulers grant 120 s."""
_PATIENCE_SECONDS = 30.0
"""Time in which machines usually find each other."""


@dataclass(frozen=True)
class Nodes:
    """The machines of one training, each of which launches its processes with the same command.

    Attributes:
        count: Number of machines.
        rendezvous: Host and port of one of them, where they find each other.
    """

    count: int
    rendezvous: str


def launch(count: int, words: Sequence[str], nodes: Nodes | None = None) -> int:
    """Runs a command line of the runner in several processes.

    A signal is passed to all processes. Of their errors, the first is printed, by the process or
    here if it was killed.

    Args:
        count: Number of processes on this machine.
        words: The command line, without the program.
        nodes: The machines whose processes form one group; None for this machine alone.

    Returns:
        The exit code: that of the error, or else of the first process on this machine.
    """
    with TemporaryDirectory(prefix="runner-launch-") as folder, _variables(count, folder):
        failures, received = _run(count, words, nodes)
        return _exit_code(Path(folder), failures, received)


def _run(
    count: int, words: Sequence[str], nodes: Nodes | None
) -> tuple[Mapping[int, ProcessFailure], signal.Signals | None]:
    """Returns the processes of this machine that failed, and the signal that ended all."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # The launcher reports every failure and signal in many lines.
    logger = logging.getLogger("torch.distributed")
    logger.handlers = [logging.NullHandler()]
    logger.propagate = False
    options = {
        "nproc-per-node": str(count),
        "rdzv-backend": "c10d",
        "shutdown-timeout": str(_SHUTDOWN_SECONDS),
        **_rendezvous_options(nodes),
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    parse: Callable[[list[str]], Any] = torchrun.parse_args
    parsed = parse([*arguments, "--module", "runner", *words])
    config, program, program_arguments = torchrun.config_from_args(parsed)
    try:
        with _warning_when_alone(nodes):
            elastic_launch(config=config, entrypoint=program)(*program_arguments)
    except ChildFailedError as error:
        return error.failures, None
    except SignalException as error:
        return {}, error.sigval
    except RendezvousError as error:
        _refuse_address(nodes, error)
    return {}, None


@contextmanager
def _warning_when_alone(nodes: Nodes | None) -> Iterator[None]:
    """Warns once if the machines have not found each other after a while.

    The launcher of torch waits for ten minutes, or without limit if another program listens at the
    port.
    """
    if nodes is None:
        yield
        return
    started = Path(os.environ[LAUNCH_FOLDER], STARTED_FILE)

    def warn() -> None:
        if not started.exists():
            print_error(
                f"--rendezvous {nodes.rendezvous}: still waiting for {nodes.count} machines; start this "
                "command on each of them, with a port that no other program listens at"
            )

    timer = threading.Timer(_PATIENCE_SECONDS, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refuse_address(nodes: Nodes | None, error: RendezvousError) -> None:
    """Raises a RunnerError if the machines have not found each other."""
    # A machine that has ended, or is lost, also breaks the connection; then the processes here have an ending.
    folder = Path(os.environ[LAUNCH_FOLDER])
    if any((folder / name).exists() for name in (FAILURE_FILE, EXIT_FILE)):
        return
    address = f"--rendezvous {nodes.rendezvous}: " if nodes else ""
    raise RunnerError(f"{address}the machines cannot find each other: {error}") from error


def _rendezvous_options(nodes: Nodes | None) -> dict[str, str]:
    """Returns the launcher's options by which the processes of a training find each other."""
    if nodes is None:
        return {"rdzv-endpoint": "localhost:0", "rdzv-id": str(uuid.uuid4()), "local-addr": "127.0.0.1"}
    # The id has to be the same on all machines; the address distinguishes trainings.
    return {"nnodes": str(nodes.count), "rdzv-endpoint": nodes.rendezvous, "rdzv-id": "runner"}


def _exit_code(
    folder: Path,
    failures: Mapping[int, ProcessFailure],
    received: signal.Signals | None,
) -> int:
    """Returns the exit code of the command, and prints what no process could."""
    failure = _read_failure(folder)
    if failure is not None and not failure.is_missing:
        return failure.exit_code
    # Written by a training that ended without an error, such as one that a signal has stopped.
    ending = folder / EXIT_FILE
    if failure is None and ending.exists():
        return int(ending.read_text(encoding="utf-8"))
    if failure is None and received is not None:
        return 128 + received
    if failure is None and not failures:
        return ExitCode.DONE
    # A process that was killed could print nothing.
    killed = {
        rank: signal.Signals(-process.exitcode).name for rank, process in failures.items() if process.exitcode < 0
    }
    if killed:
        rank, name = min(killed.items())
        print_error(f"process {rank} was killed by {name}")
    elif failure is not None:
        print_error(failure.message)
        return failure.exit_code
    return ExitCode.FAILED


def _read_failure(folder: Path) -> PeerFailure | None:
    path = folder / FAILURE_FILE
    if not path.exists():
        return None
    return PeerFailure(**json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def _variables(count: int, folder: str) -> Iterator[None]:
    """Sets the variables of the processes inside the ``with``."""
    threads = max(1, usable_cores() // count)
    variables = {LAUNCH_FOLDER: folder, **thread_variables(threads, os.environ)}
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
