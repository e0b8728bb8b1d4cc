"""Keeps freed host memory in the process."""

import ctypes
import os
from typing import ClassVar

from runner.api import Exact, Pipeline, Setting, Stage, StageConfig

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of ``mallopt(3)``."""
LARGEST_MMAP_THRESHOLD = 2**25
"""Beyond it, glibc refuses on 64 bit."""
KEPT = 2**30


class HeapRetentionConfig(StageConfig):
    """Makes the C library keep freed memory for the next allocation instead of
    returning it to the system.

    A batch of activations or gradients is a megabyte or more. glibc requests such a block from the
    kernel each time and returns it when it is freed, so every update uses fresh pages, and the
    kernel has to create and to clear each of them. With the stage, blocks of up to 32 MiB, and 1
    GiB in all, stay with the process until it ends.

    Without the stage, page faults depend on the layout of the heap: none in one process, and a thousand per
    update, which take milliseconds, in the next.

    When it helps: on a CPU, with stacked agents or larger batches.
    When it hurts: the process keeps what it needed at its peak, which another process may want.
    """

    kind: ClassVar[str] = "heap_retention"
    implementation = "HeapRetention"
    phase: ClassVar[int] = 3

    def contract(self, setting: Setting) -> Exact:
        """Returns ``Exact``: the same bits."""
        return Exact()

    def inactive(self, setting: Setting) -> str | None:
        """Returns the reason on a GPU, where torch keeps memory itself, or if the C
        library has no such setting.
        """
        if setting.device.type != "cpu":
            return "on a GPU, torch keeps freed memory itself"
        if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
            return "only the GNU C library has this setting"
        return None


class HeapRetention(Stage):
    """Sets two thresholds of the process."""

    def attach(self, pipeline: Pipeline) -> None:
        """Sets both thresholds of this process."""
        libc = ctypes.CDLL(None)
        for parameter, value in ((M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), (M_TRIM_THRESHOLD, KEPT)):
            if not libc.mallopt(parameter, value):
                pipeline.note(f"the C library refused mallopt({parameter}, {value})")
