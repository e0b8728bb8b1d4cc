"""The output on stderr during a training, also of libraries, in ``run.log`` of
its folder, limited in size.
"""

import os
import re
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.system.files import open_file
from runner.system.terminal import Rendered, clean

NAME = "run.log"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST_BYTES = 2**20
_ENOUGH = "later output is not recorded: this file has reached its largest size"


class RunLog:
    """Replaces stderr inside a ``with``, and records the lines that are written
    there, with secrets masked.

    Bars and tables of rich are not recorded. Output before the folder exists is stored until then;
    a resumed run appends. A file that cannot be written does not fail a training.
    """

    def __init__(self) -> None:
        self._stderr: Any = sys.stderr
        self._path: Path | None = None
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._unfinished = ""
        self._full = False

    def __enter__(self) -> Self:
        self._stderr = sys.stderr
        # ``__getattr__`` provides everything that the previous stream has.
        sys.stderr = self
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        # Another thread that trains may have replaced it meanwhile.
        if sys.stderr is self:
            sys.stderr = self._stderr
        if self._unfinished:
            self.keep(self._unfinished)
        self._full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)

    @property
    def rich_proxied_file(self) -> Any:
        """Returns the stream on which consoles of rich write; rich requires this name."""
        return getattr(self._stderr, "rich_proxied_file", self._stderr)

    def write(self, text: str) -> int:
        """Passes the text on, and keeps the lines that it ends."""
        self._stderr.write(text)
        if isinstance(text, Rendered):
            # Colours of a console are for the terminal alone.
            text = _COLOUR.sub("", text)
        with self._lock:
            *complete_lines, self._unfinished = (self._unfinished + text).split("\n")
        if complete_lines:
            self.keep("\n".join(complete_lines))
        return len(text)

    def open(self, folder: Path) -> None:
        """Writes the stored output to a run's folder, and later output directly."""
        with self._lock:
            self._path = folder / NAME
            stored = "".join(self._waiting)
        self._append(stored)

    def keep(self, text: str) -> None:
        """Records text without displaying it."""
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S")
        text_lines = clean(text).rstrip("\n").split("\n")
        lines = "".join(f"{timestamp} {line}\n" for line in text_lines)
        if self._path is None:
            self._waiting.append(lines)
        else:
            self._append(lines)

    def _append(self, lines: str) -> None:
        assert self._path is not None
        try:
            descriptor = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            file = os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")
            with self._lock, file:
                if not self._full and file.tell() + len(lines) > _MOST_BYTES:
                    file.write(f"{_ENOUGH}\n")
                    self._full = True
                if not self._full:
                    file.write(lines)
        except OSError:  # a full disk is reported elsewhere
            self._full = True
