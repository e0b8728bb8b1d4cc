"""Errors that a user can meet, each with the exit code that a script can act on."""

import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    GATE_FAILED = 3
    INCONCLUSIVE = 4
    STORAGE_UNAVAILABLE = 5
    DIVERGED = 6
    NO_CHECKPOINT = 7
    PREEMPTED = 75
    HANGUP = 129
    INTERRUPTED = 130
    TERMINATED = 143


TRACEBACK = "RUNNER_TRACEBACK"
"""Environment variable; if it is set, errors are printed with their tracebacks."""
KEEP_BATCH = "RUNNER_KEEP_BATCH"
"""Environment variable; if it is set, the batch of an update that runs out of memory is kept as a file."""
OUT_OF_MEMORY = 77
"""Exit code of a child process in which an allocation failed; no verb ends with it."""


def print_traceback(error: BaseException) -> None:
    """Prints the complete traceback on stderr if the user wants it."""
    if os.environ.get(TRACEBACK):
        from runner.system.terminal import print_exception

        print_exception(error)


class RunnerError(Exception):
    """A failure with a message for the user; shown without a traceback."""

    exit_code: ExitCode = ExitCode.FAILED


class PluginError(RunnerError):
    """Code of a plugin raised something; its cause is that."""


class IndivisibleBatchError(RunnerError):
    """A batch has entries whose rows belong to no sample, so it cannot be cut."""


class MemoryShortageError(RunnerError):
    """An accelerator has less memory than an update needs."""


class UsageError(RunnerError):
    """The command line or the recipe is wrong."""

    exit_code = ExitCode.USAGE


class StorageError(RunnerError):
    """Tracking or study storage cannot be used at start."""

    exit_code = ExitCode.STORAGE_UNAVAILABLE


class OutputError(RunnerError):
    """The results of a command cannot be written."""


class SentinelError(RunnerError):
    """An update of a training has another result than the baseline."""

    exit_code = ExitCode.GATE_FAILED


class DivergedError(RunnerError):
    """A loss, parameter or gradient stopped being a finite number."""

    exit_code = ExitCode.DIVERGED


class CheckpointError(RunnerError):
    """No checkpoint can be used."""

    exit_code = ExitCode.NO_CHECKPOINT


class DamagedError(CheckpointError):
    """A stored file that is not what was written."""
