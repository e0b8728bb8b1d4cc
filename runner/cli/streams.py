"""Standard streams through which no secret passes, whoever writes to them: a plugin, a library, a warning."""

import io
import sys
from typing import TextIO

from runner.system.secrets import redact


class CleanStream(io.TextIOWrapper):
    """A text stream over the bytes of another one, that masks secrets in every text it is given."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # its end would close the bytes

    def write(self, text: str) -> int:
        """Writes the text without its secrets; returns the length of what was given."""
        super().write(redact(text))
        return len(text)


def clean_streams() -> None:
    """Replaces stdout and stderr of this process."""
    sys.stdout, sys.stderr = _cleaned(sys.stdout), _cleaned(sys.stderr)


def _cleaned(stream: TextIO) -> TextIO:
    return CleanStream(stream) if isinstance(stream, io.TextIOWrapper) else stream
