"""Signs of life of a process, by which the others see that it has not stopped."""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BEAT_SECONDS = 1.0
"""Time between two signs."""
_END_SECONDS = 5.0
"""Longest time of a sign, for which the end of the process waits."""


class Heartbeat:
    """Counts signs of life in the store of the group, in a thread, until the process ends.

    Args:
        store: Shared by all processes.
        rank: Number of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        copyable: Any = store
        # Operations of the training must not wait for this thread.
        self._store = copyable.clone()
        self._key = f"beats/{rank}"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="runner-heartbeat", daemon=True)
        self._thread.start()
        # A thread that returns from torch to an interpreter that has ended aborts the process.
        atexit.register(self._end)

    def _beat(self) -> None:
        # The store is gone when the first process has ended.
        with suppress(RuntimeError):
            while not self._is_over.is_set():
                self._store.add(self._key, 1)
                self._is_over.wait(_BEAT_SECONDS)

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join(_END_SECONDS)
