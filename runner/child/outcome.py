"""What became of a child process: the one place where an error becomes an exit code, and an exit code an error."""

from __future__ import annotations

import signal
from enum import StrEnum
from pathlib import Path

from runner.system.errors import ExitCode, RunnerError

OUT_OF_MEMORY = 77
"""Exit code where an allocation failed."""


class Cause(StrEnum):
    """What became of it."""

    DONE = "done"
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
    """By its parent; nothing is wrong with it."""


_CAUSES: dict[int, Cause] = {
    OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.DIVERGED: Cause.DIVERGED,
    ExitCode.USAGE: Cause.INVALID,
    **dict.fromkeys((ExitCode.FAILED, ExitCode.STORAGE_UNAVAILABLE, ExitCode.NO_CHECKPOINT), Cause.FAILED),
}


class ChildError(RunnerError):
    """A child process did not do what it was asked; says why, in its own words."""

    def __init__(self, cause: Cause, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.cause = cause
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED


def exit_code_of(error: BaseException) -> int | None:
    """The exit code of a child that ends by this error; None if the error is a mistake and needs its traceback."""
    # Torch has its own class for a GPU, none for the host's memory, and need not be imported to be told.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        return OUT_OF_MEMORY
    return int(error.exit_code) if isinstance(error, RunnerError) else None


def failure(code: int, said: str, killed_by_kernel: bool) -> ChildError:
    """What an exit code means.

    Args:
        code: of a child that has not done what it was asked; negative for a signal.
        said: what it wrote to stderr last.
        killed_by_kernel: whether the kernel has killed a process for want of memory meanwhile.
    """
    if code == -signal.SIGKILL and killed_by_kernel:
        return ChildError(Cause.OUT_OF_MEMORY, "the kernel killed it for want of host memory")
    if code < 0:
        name = signal.Signals(-code).name
        return ChildError(Cause.CRASHED, f"its process was ended by {name}" + (f": {said}" if said else ""))
    reason = said or f"it ended with exit code {code} and without a word"
    return ChildError(_CAUSES.get(code, Cause.CRASHED), reason, code)


def kernel_kills() -> int:
    """How often this kernel has killed a process for want of memory."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
