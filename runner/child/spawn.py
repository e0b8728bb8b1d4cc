"""The parent's side of a child process: its limits, its messages, and the cause of its end."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from runner.child.protocol import attend
from runner.plugin.registry import MODULES
from runner.system.errors import OUT_OF_MEMORY, TRACEBACK, ExitCode, RunnerError, UsageError
from runner.system.files import open_file
from runner.system.processes import PYTHON, safe_environment
from runner.system.processor import thread_variables
from runner.system.secrets import registered

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from runner.recipe.recipe import Recipe

START_SECONDS = 1800.0  # longer than any compilation takes; a child that hangs must not hang its parent
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_COUNT_SECONDS = 2.0  # between two looks for what a child has started, which costs more than to look at what is known
_LAST_LINES = 8
_Stop = Callable[[], bool]
_Wait = Callable[[float | None], int | None]
"""Waits for a process to end, at most the given seconds; returns its exit code,
or None if it is still running.
"""


@dataclass(frozen=True)
class Limits:
    """Limits of a child process."""

    seconds: float = math.inf  # of its lifetime
    silence: float = math.inf  # seconds without a word from it
    memory: float = math.inf  # bytes of host memory of all its processes
    grace: float = 0.0  # seconds between SIGTERM and SIGKILL when it is stopped


class Cause(StrEnum):
    """The reason for the end of a child."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    DIVERGED = "diverged"
    INVALID = "invalid"  # the recipe cannot run here
    FAILED = "failed"  # it ended with an error
    CRASHED = "crashed"  # a signal ended it, or it left without a word
    HUNG = "hung"
    TIMEOUT = "timeout"
    STOPPED = "stopped"  # by its parent; nothing is wrong with it


_CAUSES: dict[int, Cause] = {
    OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.DIVERGED: Cause.DIVERGED,
    ExitCode.USAGE: Cause.INVALID,
    **dict.fromkeys((ExitCode.FAILED, ExitCode.STORAGE_UNAVAILABLE, ExitCode.NO_CHECKPOINT), Cause.FAILED),
}


class ChildError(RunnerError):
    """A child process failed; contains its error message."""

    def __init__(self, cause: Cause, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.cause = cause
        # A child reaches no verdict, so these codes come from what a plugin has called.
        is_verdict = code in (ExitCode.GATE_FAILED, ExitCode.INCONCLUSIVE)
        self.exit_code = ExitCode(code) if code in set(ExitCode) and not is_verdict else ExitCode.FAILED


class Child(AbstractContextManager["Child"]):
    """A process that runs ``main(parent)`` of a module, in a process group and with a folder that end with it.

    Its recipe is given to it with its secrets, and nothing of it is in a file or on a command line.
    """

    def __init__(
        self,
        module: str,
        recipe: Recipe | Mapping[str, Any] | None = None,  # or its values
        *,
        plugin_files: Sequence[Path] = (),  # that the recipe needs
        options: Mapping[str, Any] | None = None,  # further input of the module
        limits: Limits | None = None,
        threads: int | None = None,  # its share of the cores; the user's variables win
        # Copies a process that has imported the module, which takes no time,
        # instead of starting a new one.
        forked: bool = False,
        # For a CPU; the copied process then has the vector instructions ready.
        compiles: bool = False,
    ) -> None:
        _refuse_classes(recipe)
        self._limits = limits or Limits()
        self._folder = tempfile.TemporaryDirectory(prefix="runner-child-", ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name, "stderr")
        os.close(open_file(self._errors, os.O_WRONLY | os.O_CREAT, 0o600))
        self._kernel_kills = _kernel_kills()
        # On the clock of ``monotonic``: the start, the last look at its memory, the last search for
        # its processes, and when it was told to stop.
        self._start = time.monotonic()
        self._last_look = self._start
        self._last_search = -math.inf
        self._stop_time: float | None = None
        self.cpu_seconds = 0.0  # of all its processes, as far as seen: they are only where their memory is limited
        self._connection, connection_of_child = multiprocessing.Pipe()
        # Sends a message; an OSError means that the process has ended.
        self.send = self._connection.send
        if forked:
            self._pid, self._wait = _forked(module, connection_of_child, self._errors, compiles)
        else:
            self._pid, self._wait = _executed(module, connection_of_child, self._errors, threads)
        connection_of_child.close()
        self._family: list[psutil.Process] = []
        order = {
            "recipe": _arguments_of(recipe),
            "secrets": registered(),
            "plugin_files": [path.absolute() for path in plugin_files],
            "options": options or {},
            "folder": Path(self._folder.name),
        }
        # It may have ended already, which ``receive`` reports.
        with suppress(psutil.Error, OSError):
            self._family.append(psutil.Process(self._pid))
            self.send(order)

    def __exit__(self, *_: object) -> None:
        """Ends it, by itself if it waits for a command, with all processes that it has started."""
        self._connection.close()
        self._wait(_END_SECONDS)
        self._end_group()
        self._folder.cleanup()

    def ask(self, command: str, timeout: float = 300.0, *arguments: bytes) -> dict[str, Any]:
        """Gives a command, if needed with arguments, and waits for the answer, as ``answer`` does."""
        self.order(command, *arguments)
        return self.answer(timeout, hung=f"no answer to '{command}'")

    def order(self, command: str, *arguments: bytes) -> None:
        """Gives a command, if needed with arguments, and waits for nothing."""
        # It may have ended already, which ``receive`` reports.
        with suppress(OSError):
            self.send((command, *arguments) if arguments else command)

    def answer(self, timeout: float = START_SECONDS, stop: _Stop = bool, hung: str = "no answer") -> dict[str, Any]:
        """Returns the next message like ``receive``; raises a ChildError if the
        child ends without one.
        """
        message = self.receive(stop, timeout, hung)
        if message is None:
            raise self._failure(0)
        return message

    def receive(self, stop: _Stop = bool, silence: float = math.inf, hung: str = "no word") -> dict[str, Any] | None:
        """Returns the child's next message; None if it has ended successfully.

        When ``stop`` becomes true, it is requested to stop, and may send messages for a while; after
        ``silence`` seconds without a message it counts as hung.

        Raises:
            ChildError: it has ended badly, or was ended by its limits or by ``stop``; no process of it is left.
        """
        silence = min(silence, self._limits.silence)
        start = time.monotonic()
        while True:
            # Not only the socket: a process that it has started may keep that open.
            has_ended = self._wait(0.0) is not None
            self._keep_to_limits(stop)
            try:
                if self._connection.poll(0 if has_ended else _LOOK_SECONDS):
                    message: dict[str, Any] = self._connection.recv()
                    return message
            except (EOFError, OSError):
                has_ended = True
            if has_ended:
                break
            if time.monotonic() - start > silence:
                self._kill(Cause.HUNG, f"{hung} for {silence:g} s")
        code = self._wait(_END_SECONDS)
        if code is None:
            self._kill(Cause.HUNG, "it does not end")
        self._end_group()
        if self._stop_time is not None:
            raise ChildError(Cause.STOPPED, "it was stopped")
        if code != 0:
            raise self._failure(code)
        return None

    def _keep_to_limits(self, stop: _Stop) -> None:
        limits = self._limits
        current_time = time.monotonic()
        if current_time - self._last_look > _LOOK_SECONDS and limits.memory < math.inf:
            self._last_look = current_time
            used = self._memory(current_time) / 2**30
            allowed = limits.memory / 2**30
            if used > allowed:
                self._kill(
                    Cause.OUT_OF_MEMORY,
                    f"its processes took {used:.1f} GiB of host memory, of {allowed:.1f}",
                )
        if current_time - self._start > limits.seconds:
            self._kill(Cause.TIMEOUT, f"it ran for more than {limits.seconds:g} s")

        if self._stop_time is None and stop():
            self._stop_time = current_time
            if limits.grace and self._wait(0.0) is None:
                os.kill(self._pid, signal.SIGTERM)
        if self._stop_time is not None and current_time - self._stop_time >= limits.grace:
            self._kill(Cause.STOPPED, "it was stopped")

    def _memory(self, current_time: float) -> int:
        """Returns the bytes of host memory of all its processes; adds up their processor time, too."""
        if self._family and current_time - self._last_search > _COUNT_SECONDS:
            self._last_search = current_time
            with suppress(psutil.Error):
                self._family[1:] = self._family[0].children(recursive=True)
        memory = 0
        cpu_seconds = 0.0
        for process in self._family:
            with suppress(psutil.Error):
                memory += process.memory_info().rss
                # Of user and system, of the process and its children.
                cpu_seconds += sum(process.cpu_times()[:4])
        self.cpu_seconds = max(self.cpu_seconds, cpu_seconds)
        return memory

    def _kill(self, cause: Cause, reason: str) -> NoReturn:
        self._end_group()
        raise ChildError(cause, reason)

    def _failure(self, code: int) -> ChildError:
        """Returns the error for the exit code of a child that has failed; negative for a signal."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        output = "\n".join(lines if os.environ.get(TRACEBACK) else lines[-_LAST_LINES:])
        if code == -signal.SIGKILL and _kernel_kills() > self._kernel_kills:
            return ChildError(Cause.OUT_OF_MEMORY, "the kernel killed it because host memory was exhausted")
        if code < 0:
            reason = f"its process was ended by {signal.Signals(-code).name}"
            return ChildError(Cause.CRASHED, f"{reason}: {output}" if output else reason)
        reason = output or f"it ended with exit code {code} and without a word"
        return ChildError(_CAUSES.get(code, Cause.CRASHED), reason, code)

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        # It may have had no time to create a process group.
        if self._wait(0.0) is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._wait(None)


def may_fork(device: str, accelerator: bool) -> bool:
    """Decides whether a training's process may be a copy of one that has imported torch.

    A driver cannot be initialised again in a copy, and earlier imports may have initialised it: on
    a machine with an accelerator every training runs in a new process, whatever device it uses.

    Args:
        device: The recipe's device: ``auto``, ``cpu`` or ``cuda``.
        accelerator: Whether torch finds an accelerator on this machine.
    """
    return device in ("auto", "cpu") and not accelerator


def _forked(module: str, connection: Connection, errors: Path, compiles: bool) -> tuple[int, _Wait]:
    context = multiprocessing.get_context("forkserver")
    # Every training that compiles imports these modules, which takes more than a
    # second. The first copy decides.
    more = ["runner.child.compiling"] if compiles else []
    context.set_forkserver_preload(["torch._inductor.compile_fx", *more, module])
    process = context.Process(target=attend, args=(module, connection, str(errors)))
    process.start()

    def wait(seconds: float | None) -> int | None:
        process.join(seconds)
        return process.exitcode

    return process.pid or 0, wait


def _executed(module: str, connection: Connection, errors: Path, threads: int | None) -> tuple[int, _Wait]:
    environment = safe_environment()
    if threads is not None:
        environment |= thread_variables(threads, environment)
    descriptor = connection.fileno()
    code = (
        "from multiprocessing.connection import Connection; from runner.child.protocol import attend; "
        f"attend({module!r}, Connection({descriptor}))"
    )
    with open(open_file(errors, os.O_WRONLY | os.O_APPEND), "ab") as output:
        process = subprocess.Popen(
            [*PYTHON, "-c", code],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            # Ctrl-C is for the parent.
            start_new_session=True,
        )

    def wait(seconds: float | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode

    return process.pid, wait


def _kernel_kills() -> int:
    """Returns the number of processes that this kernel has killed because memory was exhausted."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        # Not every system has this file.
        return 0
    return sum(map(int, re.findall(r"^oom_kill (\d+)$", counters, re.MULTILINE)))


def _arguments_of(recipe: Recipe | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a recipe with its secrets, as arguments of ``from_values``."""
    if recipe is None:
        return None
    if isinstance(recipe, Mapping):
        return {"values": recipe, "path": "recipe", "origins": {}}
    return {
        "values": recipe.values(masked=False),
        "path": str(recipe.path),
        "origins": recipe.origins,
        "tuning": recipe.tuning,
    }


def _refuse_classes(recipe: Recipe | Mapping[str, Any] | None) -> None:
    """Raises a UsageError if a recipe uses classes of a program, which another process cannot import."""
    if recipe is None or isinstance(recipe, Mapping):
        return
    for config in recipe.plugins():
        face = type(config)
        if face.__module__ in MODULES:
            problem = f"class {face.__name__} of '{face.__module__}' cannot be imported by a child process"
            raise UsageError(f"plugins: {problem}; write it to a file, and name that: plugins=['FILE.py']")
