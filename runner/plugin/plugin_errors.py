"""Errors in a plugin's code, as one paragraph for its author."""

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from runner.plugin.registry import FILES, MODULES, packages
from runner.system.errors import PluginError, RunnerError
from runner.system.secrets import redact
from runner.system.suggestions import shown_path

_MESSAGE_LINES, _FIRST_STEPS, _LAST_STEPS = 8, 2, 4
"""Limits of the lines of a paragraph; a recursion has a thousand steps, and some
messages of torch, too.
"""


def mistake(error: BaseException) -> PluginError | None:
    """Returns the message about an exception that passed through a plugin, or None if it did not.

    It is one paragraph: the exception and the line of the plugin that raised it, the lines of the plugin that led to
    it, and the notes of the exception, such as the batch.
    """
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    known = packages()
    steps = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_of_plugin(frame, known)]
    if not steps:
        return None
    names = [frame.f_code.co_qualname.replace(".<locals>", "") for frame, _ in steps]
    places = [f"{shown_path(Path(frame.f_code.co_filename))}:{line}" for frame, line in steps]
    sources = [traceback.FrameSummary(frame.f_code.co_filename, line, "").line for frame, line in steps]
    lines = [f"{place}, {name}: {text}" for place, name, text in zip(places, names, sources, strict=True)]
    headline = f"{names[-1]} in {places[-1]}: {described(error)}"
    return PluginError(redact("\n    ".join([headline, *_shortened(lines), *_notes(error)])))


def described(error: BaseException) -> str:
    """Returns the class and message of an exception, without its notes and in a few lines at most."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called; raise an exception instead"
    error_lines = traceback.TracebackException(type(error), error, None)
    error_lines.__notes__ = None
    lines = "".join(error_lines.format_exception_only()).strip().split("\n")
    if len(lines) > _MESSAGE_LINES:
        lines = [*lines[:_MESSAGE_LINES], f"... ({len(lines) - _MESSAGE_LINES} more lines)"]
    return "\n".join(lines)


def place_of(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Returns where a thread is: its innermost line of a plugin, or of anything if it is in no plugin."""
    known = packages()
    of_plugin = [(frame, line) for frame, line in frames if _is_of_plugin(frame, known)]
    if not (of_plugin or frames):
        return "unknown"
    frame, line = (of_plugin or frames)[-1]
    name = frame.f_code.co_qualname.replace(".<locals>", "")
    return f"{name} in {shown_path(Path(frame.f_code.co_filename))}:{line}"


@contextmanager
def told() -> Iterator[None]:
    """Makes what a plugin raises inside the ``with`` a PluginError."""
    try:
        yield
    except RunnerError:
        raise
    except BaseException as error:
        if message := mistake(error):
            raise message from error
        raise


@contextmanager
def noted(note: Callable[[], str]) -> Iterator[None]:
    """Adds a note, such as the batch, to an exception that is raised inside the ``with``."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RunnerError):
            error.add_note(note())
        raise


def _shortened(lines: list[str]) -> list[str]:
    """Returns the first and the last of the lines."""
    hidden = len(lines) - _FIRST_STEPS - _LAST_STEPS
    if hidden <= 1:
        return lines
    return [*lines[:_FIRST_STEPS], f"... ({hidden} more calls)", *lines[-_LAST_STEPS:]]


def _notes(error: BaseException) -> list[str]:
    return [line for note in getattr(error, "__notes__", ()) for line in str(note).split("\n")]


def _is_of_plugin(frame: FrameType, known: frozenset[str]) -> bool:
    """Returns whether a frame is of an installed plugin's package, of a plugin file or class, or of
    a file in its folder.
    """
    module = str(frame.f_globals.get("__name__"))
    if module in MODULES or any(f"{module}.".startswith(f"{package}.") for package in known):
        return True
    path = Path(frame.f_code.co_filename).resolve()
    beside = any(path.is_relative_to(file.parent) for file in FILES)
    return beside and module.partition(".")[0] != "runner" and not path.is_relative_to(sys.prefix)
