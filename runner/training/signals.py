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
from typing import Any, Protocol

# Least time after a signal for the current update; slow updates have more.
GRACE_SECONDS = 2.0
# After the grace, interrupted code has this time to let the exception through.
UNWINDING_SECONDS = 1.5
_LONGEST_GRACE = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopNow(BaseException):
    """Raised inside code that does not return, after a signal.

    It is not an ``Exception``, so that user code does not handle it.
    """


class Stop:
    """The signal that requested the end of a training, if there was one.

    Attributes:
        received: The signal.
        acknowledged: Whether the training has noticed it and saves its state, which nothing may
            interrupt.
        pace: Seconds between two checks of ``received`` by the training.
        error: The exception to raise instead of ``StopNow``.
        give_up: Ends the process when nothing else does; called in another thread.
    """

    received: signal.Signals | None = None
    acknowledged = False
    pace = 0.0
    error: BaseException | None = None
    give_up: Callable[[signal.Signals | None], None] | None = None

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def grace(self) -> float:
        """Seconds from the signal to the exception."""
        return max(GRACE_SECONDS, min(2 * self.pace, _LONGEST_GRACE))

    def abandon(self) -> None:
        """Called before the training is interrupted without an update to stop at."""

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in the main thread, whatever it does; gives up if it does not end."""
        self.error = error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        self.count_down(UNWINDING_SECONDS)

    def count_down(
        self, seconds: float, received: signal.Signals | None = None
    ) -> None:
        """Gives up after ``seconds`` unless the training is saving or finished by then."""
        time.sleep(seconds)
        if self.give_up is not None and not self.acknowledged:
            self.give_up(self.received or received)


class GroupVote(Protocol):
    """The votes of several processes on the signal that ends their training.

    Attributes:
        pending: Number of the signal of this process; 0 without one.
        agreed: Number of the signal at which all stop; 0 until they agree.
        is_failing: Whether this process ends because of a failure.
    """

    pending: int
    agreed: int
    is_failing: bool


class GroupStop(Stop):
    """The signal at which several processes stop after the same update.

    Args:
        vote: Counts the processes that have received a signal.

    Attributes:
        is_abandoned: Whether this process stops without the others, inside of code that does not
            return.
    """

    def __init__(self, vote: GroupVote) -> None:
        self.is_abandoned = False
        self._vote = vote
        self._has_acknowledged = False

    @property
    def received(self) -> signal.Signals | None:
        """Returns the signal on which all processes have agreed."""
        return signal.Signals(self._vote.agreed) if self._vote.agreed else None

    @received.setter
    def received(self, received: signal.Signals | None) -> None:
        self._vote.pending = received or 0

    @property
    def acknowledged(self) -> bool:
        """Returns whether nothing may interrupt this process, because it saves or fails."""
        return self._has_acknowledged or self._vote.is_failing

    @acknowledged.setter
    def acknowledged(self, acknowledged: bool) -> None:
        self._has_acknowledged = acknowledged

    def abandon(self) -> None:
        """Stops at the signal of this process without the others."""
        self.is_abandoned = not self._vote.agreed
        self._vote.agreed = self._vote.agreed or self._vote.pending


# Processes that are forked from this one do not have its training.
_current: Stop | None = None


@contextmanager
def stop_on_signals(
    interrupts: bool = False, vote: GroupVote | None = None
) -> Iterator[Stop]:
    """Lets SIGTERM, SIGHUP and the first SIGINT stop a training between two updates.

    A second SIGINT stops it immediately. Signals reach only the main thread; a training in another
    one is not stopped. A signal that is ignored when the process starts (nohup) stays ignored.

    Args:
        interrupts: Whether code that has not returned after ``Stop.grace`` is interrupted by
            ``StopNow``, and ``Stop.give_up`` is called if that does not end it, either.
        vote: The votes of several processes; without them, this process stops alone.
    """
    global _current
    stop = Stop() if vote is None else GroupStop(vote)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def receive(number: int, _frame: FrameType | None) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.received = signal.Signals(number)
        if interrupts:
            signal.setitimer(signal.ITIMER_REAL, stop.grace)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if not stop.acknowledged:
            stop.abandon()
            raise stop.error or StopNow

    handlers: dict[int, Any] = {
        number: receive
        for number in _SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    if interrupts:
        handlers[signal.SIGALRM] = interrupt
    previous_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    outer = _current
    _current = stop
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
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@contextmanager
def _watched(stop: Stop) -> Iterator[None]:
    """Notices signals in a thread."""
    # Handlers do not run while the main thread is inside of a call of C.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

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
        signal.set_wakeup_fd(previous_writer)
        os.close(writer)


def _leave_to_the_parent() -> None:
    """Gives a process that a training has forked the default signals."""
    global _current
    if _current is None:
        return
    _current = None
    # A process that another thread has forked cannot set handlers.
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:
                continue
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:
                signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_the_parent)


def main_frames() -> list[tuple[FrameType, int]]:
    """Returns the frames and lines of the main thread, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]
