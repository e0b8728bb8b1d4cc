"""A training in its child process, as the worker sees it: within its limits, and ended for what it really was."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from runner.recipe import Recipe
from runner.study.config import LimitsConfig, StudyConfig
from runner.study.training import ANEW, GO_ON, PRUNED, SPOOL, STOP, Order, main
from runner.system.errors import ExitCode
from runner.system.hardware import available_memory
from runner.system.secrets import redact
from runner.tracking.spool import place_of
from runner.train.assemble import OUT_OF_MEMORY
from runner.train.checkpoint.reader import checkpoints
from runner.train.loop import CHECKPOINTS

GRACE_SECONDS = 30.0
"""For a checkpoint, after SIGTERM."""
_LOOK_SECONDS = 0.2
_COUNT_SECONDS = 2.0
"""Between two looks for processes that the training has started, which costs more than to look at those known."""
_LAST_LINES = 8


class Cause(StrEnum):
    """What became of a training."""

    DONE = "done"
    PRUNED = "pruned"
    OUT_OF_MEMORY = "out of memory"
    DIVERGED = "diverged"
    INVALID = "invalid"
    """The recipe cannot run here."""
    FAILED = "failed"
    """It ended with an error."""
    CRASHED = "crashed"
    """A signal ended it, or it left without a word."""
    HUNG = "hung"
    TIMEOUT = "timeout"
    STOPPED = "stopped"
    """By the worker; nothing is wrong with it."""

    @property
    def transient(self) -> bool:
        """Whether the same training might end well another time."""
        return self in (Cause.CRASHED, Cause.HUNG)


@dataclass(frozen=True)
class Ended:
    """How a training ended."""

    cause: Cause
    reason: str
    seconds: float = 0.0
    training_seconds: float | None = None
    """Without starting and ending the process; None if it did not come to its end."""
    cpu_seconds: float = 0.0
    """Of the process and its children, as far as seen."""
    anew: bool = False
    """Whether it has to begin anew, because its checkpoints cannot be gone on from."""


class Training:
    """One attempt at one training.

    Args:
        recipe: what to train.
        folder: exists; its checkpoints and metrics.
        metric: whose values decide whether to go on; empty if nothing does.
        prefix: stands before the names of metrics.
        plugin_files: local plugin files that the recipe needs.
        limits: what it may use.
        go_on: given a value and a step, whether the training is to go on.
        stop: becomes true when the worker has to end.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        metric: str,
        prefix: str,
        plugin_files: Sequence[Path],
        limits: LimitsConfig,
        go_on: Callable[[float, int], bool],
        stop: Callable[[], bool],
    ) -> None:
        self._recipe, self._limits, self._go_on, self._stop = recipe, limits, go_on, stop
        self._folder, self._metric, self._prefix, self._files = folder, metric, prefix, tuple(plugin_files)
        self._memory = math.inf if limits.memory_gib is None else limits.memory_gib * 2**30
        self._family: list[psutil.Process] = []
        self._counted = -math.inf
        self._cpu = 0.0
        self._training_seconds: float | None = None
        self.step = 0

    def run(self) -> Ended:
        """Trains to the end, whatever end that is; no process is left when this returns."""
        started, out_of_memory = time.monotonic(), _kernel_kills()
        with tempfile.TemporaryDirectory(prefix="runner-trial-") as below:
            path, errors = Path(below) / "recipe.yaml", Path(below) / "stderr"
            path.touch(mode=0o600)  # the child needs the secrets too
            path.write_text(json.dumps(self._recipe.values(masked=False), ensure_ascii=False), encoding="utf-8")
            here, there = _context().Pipe()
            order = Order(path, self._folder, errors, self._metric, self._prefix, self._files)
            child = _context().Process(target=main, args=(order, there))
            child.start()
            there.close()
            try:
                cause, reason = self._watch(child, here)
            finally:
                _end(child)
                here.close()
            if not reason:
                cause, reason = _told(child.exitcode or 0, self._training_seconds is not None, _tail(errors))
        if child.exitcode == -signal.SIGKILL and cause == Cause.CRASHED and _kernel_kills() > out_of_memory:
            cause, reason = Cause.OUT_OF_MEMORY, "the kernel killed it for want of host memory"
        if self._stop() and cause not in (Cause.DONE, Cause.PRUNED):  # who stops the worker may signal the child, too
            cause, reason = Cause.STOPPED, "the worker was told to end"
        seconds, anew = time.monotonic() - started, child.exitcode == ANEW
        return Ended(cause, reason, seconds, self._training_seconds, self._cpu, anew)

    def _watch(self, child: ForkServerProcess, parent: Connection) -> tuple[Cause, str]:
        """Waits for the end, or brings it about.

        Returns:
            The cause with a reason where this side has ended it; no reason otherwise.
        """
        process, limits = _process(child.pid), self._limits
        started = heard = looked = time.monotonic()
        while True:
            ready = wait([parent, child.sentinel], _LOOK_SECONDS)
            if parent in ready:
                try:
                    self._answer(json.loads(parent.recv_bytes()), parent)
                    heard = time.monotonic()
                except (EOFError, OSError):
                    child.join(GRACE_SECONDS)
                    return Cause.DONE, ""
            elif ready:
                return Cause.DONE, ""
            now = time.monotonic()
            if now - looked >= _LOOK_SECONDS:
                looked = now
                memory = self._look(process, now)
                if memory > self._memory:
                    used, allowed = memory / 2**30, self._memory / 2**30
                    return Cause.OUT_OF_MEMORY, f"its processes took {used:.1f} GiB of host memory, of {allowed:.1f}"
            if limits.seconds is not None and now - started > limits.seconds:
                return Cause.TIMEOUT, f"it ran for more than {limits.seconds:g} s"
            if now - heard > limits.silence:
                return Cause.HUNG, f"no sign of progress for {limits.silence:g} s, after step {self.step:,}"
            if self._stop():
                child.terminate()
                self._wait_for(child, parent)
                return Cause.STOPPED, "the worker was told to end"

    def _wait_for(self, child: ForkServerProcess, parent: Connection) -> None:
        """Waits for a training that writes its checkpoint, and answers what it may ask before."""
        deadline = time.monotonic() + GRACE_SECONDS
        while child.is_alive() and time.monotonic() < deadline:
            try:
                if parent in wait([parent, child.sentinel], _LOOK_SECONDS):
                    self._answer(json.loads(parent.recv_bytes()), parent)
            except (EOFError, OSError):
                child.join(max(0.0, deadline - time.monotonic()))

    def _answer(self, told: dict[str, Any], parent: Connection) -> None:
        self.step = told["step"]
        self._training_seconds = told.get("done")
        if "value" in told:
            parent.send_bytes(GO_ON if self._go_on(told["value"], told["step"]) else STOP)

    def _look(self, process: psutil.Process | None, now: float) -> int:
        """Bytes of memory of the training's processes now."""
        memory, cpu = 0, 0.0
        if now - self._counted > _COUNT_SECONDS:
            self._counted, self._family = now, _family(process)
        for each in self._family:
            try:
                memory += each.memory_info().rss
                times = each.cpu_times()
                cpu += times.user + times.system + times.children_user + times.children_system
            except psutil.Error:
                continue
        self._cpu = max(self._cpu, cpu)
        return memory


@cache
def _context() -> ForkServerContext:
    """A process that has imported what takes seconds to import, and done nothing else, is copied for every training."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "runner.study.training"])
    return context


def limits_of(config: StudyConfig) -> LimitsConfig:
    """The limits of one training; all that go on at a time may take half of the memory that was free at first."""
    if config.limits.memory_gib is not None:
        return config.limits
    return config.limits.model_copy(update={"memory_gib": _free_at_first() / 2**31 / config.budget.parallel})


@cache
def _free_at_first() -> int:
    return available_memory()


def begin(folder: Path) -> None:
    """Makes the folder of a training ready, which goes on if it has a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoints(folder / CHECKPOINTS):
        forget(folder)


def forget(folder: Path) -> None:
    """Clears the folder of a training that begins anew."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    for path in (folder / SPOOL, place_of(folder / SPOOL)):
        path.unlink(missing_ok=True)


def _kernel_kills() -> int:
    """How often this kernel has killed a process for want of memory."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _process(pid: int | None) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:  # it has ended already
        return None


def _family(process: psutil.Process | None) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)] if process is not None else []
    except psutil.Error:
        return []


def _end(child: ForkServerProcess) -> None:
    """Kills what is left of a training, with all processes that it started."""
    assert child.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.is_alive():  # it had no time to make a group of its own
        child.kill()
    child.join()


def _tail(errors: Path) -> str:
    said = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
    return "\n".join(redact(said.strip()).splitlines()[-_LAST_LINES:])


def _told(code: int, done: bool, said: str) -> tuple[Cause, str]:
    """What an exit code means."""
    if code == 0 and done:
        return Cause.DONE, ""
    if code < 0:
        name = signal.Signals(-code).name
        return Cause.CRASHED, f"its process was ended by {name}" + (f": {said}" if said else "")
    known = {
        PRUNED: Cause.PRUNED,
        ANEW: Cause.FAILED,
        OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
        ExitCode.DIVERGED: Cause.DIVERGED,
        ExitCode.USAGE: Cause.INVALID,
        ExitCode.FAILED: Cause.FAILED,
    }
    return known.get(code, Cause.CRASHED), said or f"it ended with exit code {code} and without a word"
