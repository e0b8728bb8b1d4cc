"""A device without a GPU: a thread that copies later than it is asked to."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.proof.device_queues import DeviceQueues


class LateStream:
    """Work that a thread performs in its order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._perform, daemon=True).start()

    def submit(self, work: Callable[[], object]) -> threading.Event:
        """Queues work; returns an event that is set when it is done."""
        done = threading.Event()
        self._work.put(lambda: (work(), done.set()))
        return done

    def _perform(self) -> None:
        while True:
            self._work.get()()


class LateQueues(DeviceQueues):
    """One side queue; the main queue is the host, which is never late."""

    def __init__(self) -> None:
        self.stream = LateStream()

    @contextmanager
    def note_side_queues(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.stream.submit(lambda: None).wait()

    def delay_main(self, seconds: float) -> None:
        time.sleep(0)

    def delay_sides(self, seconds: float) -> None:
        self.stream.submit(lambda: time.sleep(seconds))
