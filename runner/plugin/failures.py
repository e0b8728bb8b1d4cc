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

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the kernel's, where torch puts what workers deliver)


def add_place(error: Exception, place: str) -> None:
    """Adds where in the data an error happened: to the message of a RunnerError, to others as a note."""
    if isinstance(error, RunnerError) and len(error.args) == 1:
        error.args = (f"{error.args[0]} ({place})",)
    else:
        error.add_note(place)


@dataclass(frozen=True)
class Failure:
    """An exception of a worker process, in a form that its parent can raise again.

    Attributes:
        error: The exception. One that cannot be pickled is replaced by a RuntimeError with its type and message.
        frames: File, line, function and module of its traceback, the outermost call first.
    """

    error: Exception
    frames: tuple[tuple[str, int, str, str], ...]

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describes an exception that was just caught."""
        frames = tuple(
            (frame.f_code.co_filename, line, frame.f_code.co_qualname, str(frame.f_globals.get("__name__")))
            for frame, line in traceback.walk_tb(error.__traceback__)
        )
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 (its own bytes)
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
    following: TracebackType | None = None
    for file, line, function, module in reversed(list(frames)):
        try:
            exec(_raising(file, line, function), {"__name__": module})  # noqa: S102 (code made here)
        except ZeroDivisionError as error:
            frame = error.__traceback__ and error.__traceback__.tb_next
            if frame is not None:
                following = TracebackType(following, frame.tb_frame, frame.tb_lasti, line)
    return following


def _raising(file: str, line: int, function: str) -> CodeType:
    """Makes code that raises and appears to be a function of another file."""
    code = compile("1 / 0", file, "exec")
    name = function.rpartition(".")[2]
    return code.replace(co_name=name, co_qualname=function, co_firstlineno=line)


def is_shortage(error: Exception) -> bool:
    """Returns whether shared memory is used up: torch collates right into it in a worker."""
    text = str(error)
    return isinstance(error, RuntimeError) and "/torch_" in text and "No space left on device" in text


def describe_full_shared_memory() -> str:
    """Returns the message about shared memory that is used up, with what to do."""
    size = f" ({shutil.disk_usage(_SHARED_MEMORY).total / 2**20:,.0f} MiB)" if _SHARED_MEMORY.is_dir() else ""
    hint = "enlarge it (docker run --shm-size=2g), or use fewer data.workers, a smaller batch, or data.workers: 0"
    return f"data.workers: the shared memory in {_SHARED_MEMORY}{size} is too small for the batches of workers: {hint}"
