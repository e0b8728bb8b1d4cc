"""Time limits and signals that end a comparison, so that results until then can be
reported.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from runner.system.errors import ExitCode

NOT_BEGUN = "no training was started within the budget"
_IMPORT_SECONDS = 0.1
"""Time after which an import may be over."""
# Torch may swallow an exception in a callback.
_REPEAT_SECONDS = 5.0
"""Time after which the exception is raised again."""


class OutOfTime(BaseException):
    """A time limit is over.

    It is a ``BaseException``, so that user code and comparisons do not handle it.

    Args:
        partial: Intermediate result, for the verdict.
    """

    def __init__(self, partial: str = "") -> None:
        super().__init__(partial)
        self.partial = partial


class Interrupted(BaseException):
    """SIGTERM or SIGINT has ended a comparison.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number

    @property
    def exit_code(self) -> ExitCode:
        """Returns 130 for SIGINT and 143 for SIGTERM."""
        if self.signal is signal.SIGINT:
            return ExitCode.INTERRUPTED
        return ExitCode.TERMINATED


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises ``Interrupted`` inside the ``with`` at the first SIGTERM or SIGINT; a second
    one has the handler of the caller.
    """
    if not _in_main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        restore()
        raise Interrupted(signal.Signals(number))

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        restore()


class TimeLimit:
    """A budget of seconds for several comparisons.

    A limit ends Python code and waiting by a timer of the operating system, whose
    signal reaches the main thread. Other threads are not ended.

    Args:
        seconds: The budget from here on; infinity for none.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._deadlines: list[float] = []
        """Deadlines of the entered contexts, the outermost first."""

    @property
    def seconds_left(self) -> float:
        """Returns the remaining seconds of the budget; below zero once it is spent."""
        return self._deadline - time.monotonic()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raises ``OutOfTime`` inside the ``with`` after the given seconds, or
        when an outer limit is over.
        """
        if seconds == math.inf or not _in_main_thread():
            yield
            return
        if seconds <= 0:
            raise OutOfTime
        handler = signal.getsignal(signal.SIGALRM)
        timer_seconds, interval = signal.getitimer(signal.ITIMER_REAL)
        entered = time.monotonic()
        self._deadlines.append(time.monotonic() + seconds)
        signal.signal(signal.SIGALRM, _raise)
        try:
            try:
                # The time may be over immediately.
                self._arm()
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            # The time may have been over in the line before.
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._deadlines.pop()
            signal.signal(signal.SIGALRM, handler)
            if self._deadlines:
                self._arm()
            elif timer_seconds:
                # The timer of the caller continues.
                elapsed = time.monotonic() - entered
                remaining = max(timer_seconds - elapsed, 1e-3)
                signal.setitimer(signal.ITIMER_REAL, remaining, interval)

    def _arm(self) -> None:
        seconds = max(min(self._deadlines) - time.monotonic(), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)


def _raise(_number: int, frame: FrameType | None) -> None:
    """Raises ``OutOfTime`` when no import is running."""
    # An extension makes an ImportError of it, and cannot be imported again.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS, _REPEAT_SECONDS)
            return
        frame = frame.f_back
    raise OutOfTime


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
