"""Asks a training to stop when the process is told to."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Which signal asked the training to stop, if one did."""

    asked: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.asked is not None


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGTERM and the first SIGINT let the current update finish; a second SIGINT stops at once.

    Signals reach the main thread alone; a training in another one is not asked.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = signal.Signals(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
