"""The streams of a process, through which neither a secret nor a command to the terminal passes.

All that is printed goes through here: verbs, plugins, libraries, warnings and tracebacks write to these streams.
Only a ``Console`` of ``runner.system.console`` can colour its text, because it has escaped the text before.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from runner.system.errors import OutputError
from runner.system.escapes import escape
from runner.system.secrets import redact


class Rendered(str):
    """Text in which every control sequence was created by a console, because its
    content was escaped before.
    """

    __slots__ = ()


class CleanStream(io.TextIOWrapper):
    """A text stream over the bytes of another one. It masks secrets, and escapes what is not ``Rendered``.

    Args:
        stream: The other one.
        is_optional: Whether text that the other one does not take is lost without an error.
    """

    def __init__(self, stream: io.TextIOWrapper, is_optional: bool = False) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            stream.encoding,
            stream.errors,
            None,
            stream.line_buffering,
            stream.write_through,
        )
        self._stream = stream  # its end would close the bytes
        self._is_optional = is_optional

    def write(self, text: str) -> int:
        """Writes the text in its clean form; returns the length of the argument."""
        with self._reporting():
            super().write(redact(text) if isinstance(text, Rendered) else clean(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        with self._reporting():
            super().flush()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Makes an error inside the ``with`` an OutputError, unless the text is optional.

        A pipe whose reader has ended is no error of the output, and click ends the command.
        """
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._is_optional:
                raise OutputError(f"the output cannot be written: {error.strerror}") from error


class RenderedOutput:
    """The file of a console: it passes on what the console has rendered, marked as such.

    Args:
        stream: Returns the stream, which may be replaced while the console is in use.
    """

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes what a console has rendered."""
        return self._target().write(Rendered(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def _target(self) -> TextIO:
        # A stream that shows what is written through a live display names the one beneath it so, for consoles.
        stream = self._stream()
        target: TextIO = getattr(stream, "rich_proxied_file", stream)
        return target


def clean(text: str) -> str:
    """Returns text that a program prints, without secrets and commands to the terminal."""
    # A progress bar returns to the start of its line. A line feed keeps it readable and lets it
    # overwrite nothing.
    return escape(redact(text).replace("\r\n", "\n").replace("\r", "\n"))


def clean_streams() -> None:
    """Replaces stdout and stderr of this process: plugins, libraries and warnings write to them, too."""
    _open_closed_streams()
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            # A training does not end because its messages cannot be written.
            setattr(sys, name, CleanStream(stream, is_optional=name == "stderr"))


def _open_closed_streams() -> None:
    """Opens the null device for each standard stream that was closed before the start.

    Otherwise the next file that is opened, such as a database, would get the descriptor of the
    stream, and everything that is printed in C. The order is that of the descriptors.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it stays open)


def write(stream: TextIO | None, text: str) -> None:
    """Writes text to a stream immediately, without secrets and commands to the terminal.

    A stream that was closed before the start receives none.
    """
    if stream is not None:
        stream.write(escape(redact(text)))
        stream.flush()


def print_error(text: str) -> None:
    """Prints a message on stderr; for code that has no console."""
    write(sys.stderr, f"{text}\n")


def print_exception(error: BaseException) -> None:
    """Prints the complete traceback of an error on stderr."""
    print_error("".join(traceback.format_exception(error)).rstrip("\n"))
