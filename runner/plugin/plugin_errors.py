"""Errors in a plugin's code, as one paragraph for its author."""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from runner.plugin.registry import FILES, MODULES, packages
from runner.system.errors import PluginError, RunnerError
from runner.system.secrets import redact
from runner.system.suggestions import shown_path

# A recursion has a thousand steps, and some messages of torch have as many lines.
_MESSAGE_LINES = 8
"""Largest number of lines of an exception's message."""
_FIRST_STEPS = 2
"""Outermost calls of a plugin that are listed."""
_LAST_STEPS = 4
"""Innermost calls of a plugin that are listed."""


def mistake(error: BaseException) -> PluginError | None:
    """Returns the message about an exception that passed through a plugin, or None if it did not.

    It is one paragraph: the exception and the line of the plugin that raised it, the lines of the
    plugin that led to it, and the notes of the exception, such as the batch.
    """
    if isinstance(error, KeyboardInterrupt):
        return None
    steps = _plugin_steps(traceback.walk_tb(error.__traceback__))
    if not steps:
        return None
    lines = [_located_source(frame, line) for frame, line in steps]
    headline = f"{_location(*steps[-1])}: {described(error)}"
    paragraph = [headline, *_shortened(lines), *_notes(error)]
    # A message may have several lines, which belong to the paragraph.
    return PluginError(redact("\n".join(paragraph).replace("\n", "\n    ")))


def _location(frame: FrameType, line: int) -> str:
    return f"{_function(frame)} in {_file(frame)}:{line}"


def _located_source(frame: FrameType, line: int) -> str:
    code = traceback.FrameSummary(frame.f_code.co_filename, line, "").line
    return f"{_file(frame)}:{line}, {_function(frame)}: {code}"


def _function(frame: FrameType) -> str:
    return frame.f_code.co_qualname.replace(".<locals>", "")


def _file(frame: FrameType) -> str:
    return shown_path(Path(frame.f_code.co_filename))


def described(error: BaseException) -> str:
    """Returns the class and message of an exception, without its notes and in a few lines.

    Those of the exceptions in a group come after its own.
    """
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called; raise an exception instead"
    lines = _message_lines(error)
    if len(lines) > _MESSAGE_LINES:
        lines = [
            *lines[:_MESSAGE_LINES],
            f"... ({len(lines) - _MESSAGE_LINES} more lines)",
        ]
    return "\n".join(lines)


def _message_lines(error: BaseException) -> list[str]:
    summary = traceback.TracebackException(type(error), error, None)
    summary.__notes__ = None
    lines = "".join(summary.format_exception_only()).strip().split("\n")
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            lines += [f"    {line}" for line in _message_lines(member)]
    return lines


def place_of(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Returns where a thread is: its innermost line of a plugin, or of anything if it is in no
    plugin.
    """
    steps = _plugin_steps(frames) or frames
    return _location(*steps[-1]) if steps else "unknown"


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
    return [
        line
        for note in getattr(error, "__notes__", ())
        for line in str(note).split("\n")
    ]


def _plugin_steps(
    frames: Iterable[tuple[FrameType, int]],
) -> list[tuple[FrameType, int]]:
    """Returns the frames that are of plugins, each with its line."""
    plugin_packages = packages()
    return [
        step
        for step in frames
        if _is_of_plugin(
            str(step[0].f_globals.get("__name__")),
            step[0].f_code.co_filename,
            plugin_packages,
        )
    ]


def is_class_of_plugin(kind: type) -> bool:
    """Returns whether a class is of a plugin, or of a file in its folder."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    # Classes of a notebook have no file.
    if not file:
        return kind.__module__ in MODULES
    return _is_of_plugin(kind.__module__, file, packages())


def _is_of_plugin(module: str, file: str, plugin_packages: frozenset[str]) -> bool:
    """Returns whether code is of an installed plugin's package, of a plugin file or class, or of
    a file in its folder.

    Args:
        module: Name of its module.
        file: File of its module.
        plugin_packages: The packages of installed plugins.
    """
    if module in MODULES:
        return True
    if any(f"{module}.".startswith(f"{package}.") for package in plugin_packages):
        return True
    path = Path(file).resolve()
    if not any(path.is_relative_to(plugin.parent) for plugin in FILES):
        return False
    # The folder of a plugin file may contain the runner, or a virtual environment.
    return module.partition(".")[0] != "runner" and not path.is_relative_to(sys.prefix)
