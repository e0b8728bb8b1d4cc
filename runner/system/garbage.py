"""Pauses of Python's collector of reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Pauses the collector while modules are imported, which live until the process ends.

    Importing torch makes more than a million objects, and the collector would look at them again
    and again: it takes a fifth of the time. Afterwards it ignores what exists by then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
