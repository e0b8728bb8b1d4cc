"""Time limits and signals that end a comparison, so that what was reached before can be reported."""

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
_IMPORT_SECONDS = 0.1  # after which an import may be over
_REPEAT_SECONDS = 5.0  # after which the exception is raised again, because torch may swallow one in a callback


class OutOfTime(BaseException):
    """A time limit is over. It is no ``Exception``, so that user code and comparisons do not handle it.

    Args:
        partial: What was reached until then, for the verdict.
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
        return (
            ExitCode.INTERRUPTED
            if self.signal is signal.SIGINT
            else ExitCode.TERMINATED
        )


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises ``Interrupted`` inside the ``with`` at the first SIGTERM or SIGINT; a second one acts as before."""
    if not _in_main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        raise Interrupted(signal.Signals(number))

    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class TimeLimit:
    """A budget of seconds for several comparisons, each of which may receive a part of it.

    A limit ends Python code and waiting by a timer of the operating system, whose signal reaches the main thread. In
    another thread nothing is ended.

    Args:
        seconds: The budget from here on; infinity for none.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._deadlines: list[
            float
        ] = []  # of the contexts that are entered, the outermost first

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
        handler, timer = (
            signal.getsignal(signal.SIGALRM),
            signal.getitimer(signal.ITIMER_REAL),
        )
        entered = time.monotonic()
        self._deadlines.append(time.monotonic() + seconds)
        signal.signal(signal.SIGALRM, _raise)
        try:
            try:
                self._arm()  # inside, because the time may be over immediately
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the time was over in the line before
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._deadlines.pop()
            signal.signal(signal.SIGALRM, handler)
            if self._deadlines:
                self._arm()
            elif timer[0]:  # the caller's timer, which continues
                remaining = max(timer[0] - (time.monotonic() - entered), 1e-3)
                signal.setitimer(signal.ITIMER_REAL, remaining, timer[1])

    def _arm(self) -> None:
        seconds = max(min(self._deadlines) - time.monotonic(), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, seconds, _REPEAT_SECONDS)


def _raise(_number: int, frame: FrameType | None) -> None:
    """Raises ``OutOfTime``, once an import is over: an extension makes an ImportError of it, and is lost."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_SECONDS, _REPEAT_SECONDS)
            return
        frame = frame.f_back
    raise OutOfTime


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
