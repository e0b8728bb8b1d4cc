"""Stops a training at a signal, also one whose code does not return."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

GRACE_SECONDS = 2.0
"""After a signal, for the update that is under way; slow updates have more."""
UNWINDING_SECONDS = 1.5
"""After the grace, for code that was interrupted to let the exception through."""
_LONGEST_GRACE = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopNow(BaseException):
    """Raised inside code that does not return, after a signal; no Exception, so that user code does not handle it."""


class Stop:
    """The signal that requested the end of a training, if there was one."""

    asked: signal.Signals | None = None
    acknowledged = False
    """Whether the training has seen it and saves what it has, which nothing may interrupt."""
    pace = 0.0
    """Seconds between two checks of ``asked`` by the training."""
    error: BaseException | None = None
    """The exception to raise instead of ``StopNow``."""
    give_up: Callable[[signal.Signals | None], None] | None = None
    """Ends the process when nothing else does; called in another thread."""

    def __bool__(self) -> bool:
        return self.asked is not None

    @property
    def grace(self) -> float:
        """Seconds from the signal to the exception."""
        return max(GRACE_SECONDS, min(2 * self.pace, _LONGEST_GRACE))

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the main thread, whatever it does; gives up if it does not end."""
        self.error = error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        self.count_down(UNWINDING_SECONDS)

    def count_down(self, seconds: float, asked: signal.Signals | None = None) -> None:
        """Gives up after ``seconds`` unless the training is saving or finished by then."""
        time.sleep(seconds)
        if self.give_up is not None and not self.acknowledged:
            self.give_up(self.asked or asked)


_current: Stop | None = None
"""That of this process, which processes that are forked from it do not have."""


@contextmanager
def stop_on_signals(interrupts: bool = False) -> Iterator[Stop]:
    """Lets SIGTERM, SIGHUP and the first SIGINT stop a training between two updates; a second
    SIGINT stops it immediately.

    Signals reach only the main thread; a training in another one is not stopped. A signal that is
    ignored when the process starts (nohup) stays ignored.

    Args:
        interrupts: Whether code that has not returned after ``Stop.grace`` is interrupted by ``StopNow``, and
            ``Stop.give_up`` is called if that does not end it, either.
    """
    global _current
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = signal.Signals(number)
        if interrupts:
            signal.setitimer(signal.ITIMER_REAL, stop.grace)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if not stop.acknowledged:
            raise stop.error or StopNow

    handlers: dict[int, Any] = {
        number: ask for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN
    }
    if interrupts:
        handlers[signal.SIGALRM] = interrupt
    before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    outer, _current = _current, stop
    try:
        if interrupts:
            with _watched(stop):
                yield stop
        else:
            yield stop
    finally:
        _current = outer
        if interrupts:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watched(stop: Stop) -> Iterator[None]:
    """Notices signals in a thread, because handlers do not run while the main thread is inside of a call of C."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while numbers := os.read(reader, 64):
            for number in set(numbers) & set(_SIGNALS):
                stop.count_down(stop.grace + UNWINDING_SECONDS, signal.Signals(number))
        os.close(reader)

    threading.Thread(target=watch, name="runner-signals", daemon=True).start()
    try:
        yield
    finally:
        stop.acknowledged = True
        signal.set_wakeup_fd(before)
        os.close(writer)


def _leave_to_the_parent() -> None:
    """Gives a process that a training has forked the usual signals: they are not meant for the training."""
    global _current
    if _current is None:
        return
    _current = None
    with suppress(ValueError):  # it has no main thread
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                default = (
                    signal.default_int_handler
                    if number == signal.SIGINT
                    else signal.SIG_DFL
                )
                signal.signal(number, default)


os.register_at_fork(after_in_child=_leave_to_the_parent)


def main_frames() -> list[tuple[FrameType, int]]:
    """Returns the frames and lines of the main thread, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]
