"""A child process as its parent sees it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from runner.child.limits import Family, Limits
from runner.child.outcome import Cause, ChildError, failure, kernel_kills
from runner.child.protocol import attend_forked
from runner.recipe.recipe import Recipe
from runner.system.python import PYTHON, safe_environment
from runner.system.secrets import registered

START_SECONDS = 1800.0
"""Longer than any compilation takes; a child that hangs must not hang its parent."""
ANSWER_SECONDS = 300.0
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_LAST_LINES = 8


class Child:
    """A process that runs ``main(parent)`` of a module, in a process group and with a folder that end with it.

    Args:
        module: for example ``runner.measure.measured``.
        recipe: given to it with its secrets, or the values of one.
        stages: those of the recipe's stages that are on there; all of them unless told.
        plugin_files: local plugin files that the recipe needs.
        options: what the module wants to know beside it.
        limits: what it may use.
        threads: that it computes with; as many as it likes unless told.
        forked: whether to copy a process that has imported the module, which takes no time; else it begins as new.
        talks: whether what it writes to stderr goes where this process's goes.
    """

    def __init__(
        self,
        module: str,
        recipe: Recipe | Mapping[str, Any] | None = None,
        *,
        stages: Sequence[str] | None = None,
        plugin_files: Sequence[Path] = (),
        options: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        threads: int | None = None,
        forked: bool = False,
        talks: bool = False,
    ) -> None:
        self._limits = limits or Limits()
        self._folder = tempfile.TemporaryDirectory(prefix="runner-child-", ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr"
        self._errors.touch(mode=0o600)
        self._kernel_kills = kernel_kills()
        self._begun = self._looked = time.monotonic()
        self._told_to_stop: float | None = None
        self._connection, there = multiprocessing.Pipe()
        start = _forked if forked else _executed
        self._process = start(module, there, None if talks else self._errors, threads)
        there.close()
        self._family = Family(self._process.pid)
        files = [str(path.absolute()) for path in plugin_files]
        order = {"recipe": _given(recipe, stages), "secrets": registered(), "plugin_files": files,
                 "options": options or {}, "folder": self._folder.name}  # fmt: skip
        with suppress(OSError):  # it has ended already, which is noticed when it is listened to
            self.send(order)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cpu_seconds(self) -> float:
        """Of all its processes, as far as seen."""
        return self._family.cpu_seconds

    def send(self, what: Any) -> None:
        """Says something to it.

        Raises:
            OSError: it has ended.
        """
        self._connection.send_bytes(json.dumps(what).encode())

    def ask(
        self, command: str, timeout: float = ANSWER_SECONDS, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Gives a command and waits for the answer.

        Args:
            command: what the child can do.
            timeout: seconds after which it counts as hung, and is killed.
            stop: becomes true when nobody waits for the answer any more.

        Raises:
            ChildError: it has ended, hangs, or was stopped.
        """
        with suppress(OSError):
            self.send(command)
        return self.answer(timeout, stop, f"no answer to '{command}'")

    def answer(
        self, timeout: float = START_SECONDS, stop: Callable[[], bool] = lambda: False, hung: str = "no answer"
    ) -> dict[str, Any]:
        """Waits for an answer; otherwise as ``ask``."""
        told = self.receive(stop, timeout, hung)
        if told is None:
            raise failure(0, self._said(), False)
        return told

    def receive(
        self, stop: Callable[[], bool] = lambda: False, silence: float = math.inf, hung: str = "no word"
    ) -> dict[str, Any] | None:
        """What it says next; None if it has ended and all is well.

        Args:
            stop: becomes true when it is to end; it is then told to, and may go on talking for a while.
            silence: seconds without a word after which it counts as hung.
            hung: what is said of it then.

        Raises:
            ChildError: it has ended badly, or was ended by its limits or by ``stop``; no process of it is left.
        """
        heard, silence = time.monotonic(), min(silence, self._limits.silence)
        while True:
            ended = self._process.poll() is not None  # a process that it has started may keep its socket open
            self._keep_to_limits(stop)
            try:
                if self._connection.poll(0 if ended else _LOOK_SECONDS):
                    told: dict[str, Any] = json.loads(self._connection.recv_bytes())
                    return told
            except (EOFError, OSError):
                ended = True
            if ended:
                self._conclude()
                return None
            if time.monotonic() - heard > silence:
                self._kill(Cause.HUNG, f"{hung} for {silence:g} s")

    def close(self) -> None:
        """Ends it, by itself if it waits for a command, with all processes that it has started."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._end_group()
        self._folder.cleanup()

    def _keep_to_limits(self, stop: Callable[[], bool]) -> None:
        now, limits = time.monotonic(), self._limits
        if now - self._looked > _LOOK_SECONDS and limits.memory < math.inf:
            self._looked = now
            memory = self._family.memory()
            if memory > limits.memory:
                used, allowed = memory / 2**30, limits.memory / 2**30
                message = f"its processes took {used:.1f} GiB of host memory, of {allowed:.1f}"
                self._kill(Cause.OUT_OF_MEMORY, message)
        if now - self._begun > limits.seconds:
            self._kill(Cause.TIMEOUT, f"it ran for more than {limits.seconds:g} s")
        if self._told_to_stop is None and stop():
            self._told_to_stop = now
            if limits.grace and self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGTERM)
        if self._told_to_stop is not None and now - self._told_to_stop >= limits.grace:
            self._kill(Cause.STOPPED, "it was stopped")

    def _kill(self, cause: Cause, reason: str) -> None:
        self._end_group()
        raise ChildError(cause, reason)

    def _conclude(self) -> None:
        """Says how it ended, if not well."""
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill(Cause.HUNG, "it does not end")
        self._end_group()
        if self._told_to_stop is not None:
            raise ChildError(Cause.STOPPED, "it was stopped")
        if code != 0:
            raise failure(code, self._said(), kernel_kills() > self._kernel_kills)

    def _end_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.poll() is None:  # it had no time to make a group of its own
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _said(self) -> str:
        said = self._errors.read_text(encoding="utf-8", errors="replace")
        return "\n".join(said.strip().splitlines()[-_LAST_LINES:])


class _Process(Protocol):
    """What is asked of a process, however it was started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class _Forked:
    """A process of ``multiprocessing`` that can be asked as one of ``subprocess``."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return int(self._process.exitcode)


def _executed(module: str, connection: Any, errors: Path | None, threads: int | None) -> _Process:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = safe_environment() | ({} if threads is None else dict.fromkeys(names, str(threads)))
    with errors.open("ab") if errors else open(os.dup(2), "wb") as output:
        return subprocess.Popen(
            [*PYTHON, "-m", "runner.child", module, str(connection.fileno())],
            pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip


def _forked(module: str, connection: Any, errors: Path | None, _threads: int | None) -> _Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", module])
    process = context.Process(target=attend_forked, args=(module, connection, str(errors)))
    process.start()
    return _Forked(process)


def _given(recipe: Recipe | Mapping[str, Any] | None, stages: Sequence[str] | None) -> dict[str, Any] | None:
    """A recipe with its secrets, for ``from_values``."""
    if not isinstance(recipe, Recipe):
        return None if recipe is None else {"values": dict(recipe), "path": "recipe", "origins": {}}
    values = recipe.values(masked=False)
    if stages is not None:
        values["optimization"] = {kind: values["optimization"][kind] for kind in stages}
    origins = {
        path: [str(place.source), isinstance(place.source, Path), place.line, place.column, place.text]
        for path, place in recipe.origins.items()
    }
    return {"values": values, "path": str(recipe.path), "origins": origins}
