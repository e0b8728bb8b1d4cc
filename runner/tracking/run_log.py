"""What was said while a run was trained, in ``run.log`` of its folder: on stderr, by libraries too, and its end."""

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
_ENOUGH = "what is said from here on is not kept: this file is as long as it may be"


class RunLog:
    """Stands in for stderr while a ``with`` lasts, and keeps the lines that are written there, with secrets masked.

    Bars and tables of rich go past it, for they are not worth keeping. What is said before there is a folder waits for
    it; going on with a run appends. A file that cannot be written costs no training.
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
        sys.stderr = self  # which has all that the one before had
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if sys.stderr is self:  # and no other thread trains
            sys.stderr = self._stderr
        if self._unfinished:
            self.keep(self._unfinished)
        self._full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stderr, name)

    @property
    def rich_proxied_file(self) -> Any:
        """Where consoles of rich write what they show, which know it by this name."""
        return getattr(self._stderr, "rich_proxied_file", self._stderr)

    def write(self, text: str) -> int:
        """Passes the text on, and keeps the lines that it ends."""
        self._stderr.write(text)
        if isinstance(text, Rendered):
            # Colours of a console are for the terminal alone.
            text = _COLOUR.sub("", text)
        with self._lock:
            *whole, self._unfinished = (self._unfinished + text).split("\n")
        if whole:
            self.keep("\n".join(whole))
        return len(text)

    def open(self, folder: Path) -> None:
        """Keeps in a run's folder what was said so far, and what will be."""
        with self._lock:
            self._path, waiting = folder / NAME, self._waiting
        self._append("".join(waiting))

    def keep(self, text: str) -> None:
        """Keeps what nobody has to be told now."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{now} {line}\n" for line in clean(text).rstrip("\n").split("\n"))
        if self._path is None:
            self._waiting.append(lines)
        else:
            self._append(lines)

    def _append(self, lines: str) -> None:
        assert self._path is not None
        try:
            descriptor = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with self._lock, os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace") as file:
                if not self._full and file.tell() + len(lines) > _MOST_BYTES:
                    file.write(f"{_ENOUGH}\n")
                    self._full = True
                if not self._full:
                    file.write(lines)
        except OSError:  # the disk is full, which others say
            self._full = True
