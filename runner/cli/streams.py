"""Standard streams through which no secret passes, whoever writes to them: a plugin, a library, a warning."""

import io
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from runner.system.secrets import redact, redact_known


class CleanStream(io.TextIOWrapper):
    """A text stream over the bytes of another one, that masks secrets in every text it is given."""

    def __init__(self, stream: io.TextIOWrapper, clean: Callable[[str], str]) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # its end would close the bytes
        self._clean = clean

    def write(self, text: str) -> int:
        """Writes the text without its secrets; returns the length of what was given."""
        super().write(self._clean(text))
        return len(text)


def clean_streams() -> None:
    """Replaces stdout and stderr of this process.

    What stdout holds is data, which the verbs have masked by name; there, only what is certainly a secret is masked.
    """
    sys.stdout = _cleaned(sys.stdout, redact_known)
    sys.stderr = _cleaned(sys.stderr, redact)


def _cleaned(stream: TextIO, clean: Callable[[str], str]) -> TextIO:
    return CleanStream(stream, clean) if isinstance(stream, io.TextIOWrapper) else stream


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, without secrets; lines of code stay readable."""
    lines = traceback.format_exception(error)
    return "".join(redact(line, code=line.startswith("  ")) for line in lines)
