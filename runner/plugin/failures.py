"""Errors of worker processes, in a form that their parent can raise again."""

from __future__ import annotations

import pickle
import shutil
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import NoReturn

from runner.system.errors import RunnerError

# Linux has its shared memory there, in which torch puts the batches of workers.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def add_place(error: Exception, place: str) -> None:
    """Adds where in the data an error happened: to the message of a RunnerError, to others as a
    note.
    """
    if isinstance(error, RunnerError) and len(error.args) == 1:
        error.args = (f"{error.args[0]} ({place})",)
    else:
        error.add_note(place)


@dataclass(frozen=True)
class Failure:
    """An exception of a worker process, in a form that its parent can raise again.

    Attributes:
        error: The exception. One that cannot be pickled is replaced by a RuntimeError with its type
            and message.
        frames: File, line, function and module of its traceback, the outermost call first.
    """

    error: Exception
    frames: tuple[tuple[str, int, str, str], ...]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describes an exception that was just caught."""
        frames = tuple(
            (
                frame.f_code.co_filename,
                line,
                frame.f_code.co_qualname,
                str(frame.f_globals.get("__name__")),
            )
            for frame, line in traceback.walk_tb(error.__traceback__)
        )
        # Some exceptions can be pickled and not unpickled.
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301
        except Exception:
            replacement = RuntimeError(f"{type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                replacement.add_note(note)
            error = replacement
        return cls(error, frames)

    def reraise(self) -> NoReturn:
        """Raises the exception with a traceback that shows the worker's frames."""
        raise self.error.with_traceback(_traceback(self.frames))


def _traceback(frames: Iterable[tuple[str, int, str, str]]) -> TracebackType | None:
    """Makes a traceback of frames that are gone: tracebacks cannot be pickled."""
    inner: TracebackType | None = None
    for file, line, function, module in reversed(list(frames)):
        try:
            # Python makes frames only of code that runs.
            exec(_raising(file, line, function), {"__name__": module})  # noqa: S102
        except ZeroDivisionError as error:
            outer = error.__traceback__ and error.__traceback__.tb_next
            if outer is not None:
                inner = TracebackType(inner, outer.tb_frame, outer.tb_lasti, line)
    return inner


def _raising(file: str, line: int, function: str) -> CodeType:
    """Makes code that raises and appears to be a function of another file."""
    code = compile("1 / 0", file, "exec")
    name = function.rpartition(".")[2]
    return code.replace(co_name=name, co_qualname=function, co_firstlineno=line)


def is_shortage(error: Exception) -> bool:
    """Returns whether shared memory is used up: torch collates right into it in a worker."""
    # torch raises a RuntimeError that differs from others only by its text.
    parts = ("/torch_", "No space left on device")
    return isinstance(error, RuntimeError) and all(text in str(error) for text in parts)


def describe_full_shared_memory() -> str:
    """Returns the message about shared memory that is used up, with the fix."""
    memory = f"the shared memory in {_SHARED_MEMORY}"
    if _SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(_SHARED_MEMORY).total / 2**20
        memory += f" ({size:,.0f} MiB)"
    hint = (
        "enlarge it (docker run --shm-size=2g), or use fewer data.workers, "
        "a smaller batch, or data.workers: 0"
    )
    return f"data.workers: {memory} is too small for the batches of workers: {hint}"
