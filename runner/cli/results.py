"""The stream of results: stdout, which belongs to the verb alone."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from runner.system.terminal import CleanStream


class Results:
    """Stream for the results of a command: stdout, to which nothing else is written meanwhile."""

    def __init__(self) -> None:
        self._reserved: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        """The stream of the results."""
        return self._reserved or sys.stdout

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Sends to stderr what anything but the verb itself prints inside the ``with``.

        That is what plugins and libraries print, in Python or in C, in this process or in its
        children. If stdout is a file descriptor it remains so afterwards, because functions that
        run at exit print, too.
        """
        stdout = sys.stdout
        self._reserved = _moved(stdout)
        if self._reserved is stdout:
            sys.stdout = sys.stderr
        try:
            yield
        finally:
            reserved = self._reserved
            self._reserved = None
            if sys.stdout is sys.stderr:
                sys.stdout = stdout
            reserved.flush()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Makes the stream the stdout of processes that are started inside the ``with``."""
        descriptor = _descriptor_of(self.stream)
        if descriptor is None:
            yield
            return
        moved = os.dup(1)
        os.dup2(descriptor, 1)
        try:
            yield
        finally:
            os.dup2(moved, 1)
            os.close(moved)


results = Results()
"""The results of the verb that runs in this process."""


def _descriptor_of(stream: TextIO) -> int | None:
    """Returns the file descriptor of a stream; None if it is no file."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _moved(stream: TextIO) -> TextIO:
    """Returns a stream to the same file behind a new descriptor and redirects descriptor 1 to
    stderr; returns the stream unchanged if it does not use descriptor 1.
    """
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != 1:
            return stream
        stream.flush()
        copy = os.fdopen(os.dup(1), "w", encoding=stream.encoding, errors=stream.errors)
        os.dup2(2, 1)
    except OSError:  # stdout or stderr is closed, or is not a file
        return stream
    # Like stderr, so that the two streams stay in order on a terminal.
    stream.reconfigure(line_buffering=True)
    return CleanStream(copy)
