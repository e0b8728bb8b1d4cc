"""The end of the program."""

import atexit
import logging
import os
import sys
from contextlib import suppress


class QuickExit:
    """Ends the process after its exit functions, before the interpreter tears down every module.

    With torch imported, that takes about a second after the result is printed.
    """

    def __init__(self) -> None:
        self.code: object = 1
        """Exit code, as of ``SystemExit``."""
        # Exit functions run last in, first out: this one runs after those of all libraries.
        atexit.register(self._leave)

    def _leave(self) -> None:
        logging.shutdown()
        status = 0 if self.code is None else self.code if isinstance(self.code, int) else 1
        for stream in (sys.stdout, sys.stderr):
            # A reader that has closed its pipe needs no more of the output.
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.flush()
        os._exit(status)
