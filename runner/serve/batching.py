"""Collects requests for a short time, so that a model answers several of them together."""

from __future__ import annotations

import asyncio
import ctypes
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from runner.plugin.faces import ServedRequest
from runner.recipe.recipe import ServeConfig
from runner.serve.model import Answer

Answers = Callable[[Sequence[ServedRequest]], Sequence[Answer]]
"""Computes one answer for each request of a group."""


class QueueFullError(Exception):
    """The queue contains the largest number of requests."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after
        """Seconds."""


class ClientGoneError(Exception):
    """The client that sent a request has disconnected."""


class _AbandonedError(BaseException):
    """Raised in the thread of the model when no client waits for its batch; a BaseException, so
    that no model handles it.
    """


@dataclass(eq=False)
class _Waiting:
    request: ServedRequest
    group: Hashable
    future: asyncio.Future[bytes]
    since: float


class Batcher:
    """Collects requests of equal groups into batches, and computes one batch
    after another in a separate thread.
    """

    def __init__(self, answers: Answers, settings: ServeConfig, began: Callable[[int], object]) -> None:
        """Stores the arguments.

        Args:
            answers: Computes a batch, in the thread.
            settings: Sizes and waiting times.
            began: Called with the size of every batch.
        """
        self._answers, self._settings, self._began = answers, settings, began
        self._max_batch = 1 if settings.bit_exact else settings.max_batch
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._work: SimpleQueue[tuple[list[_Waiting], asyncio.Future[None]]] = SimpleQueue()
        self._seconds = 0.0
        self._thread: threading.Thread | None = None
        self._computed: list[_Waiting] = []
        """The batch that is being computed."""
        self._changes = threading.Lock()
        """Held while that batch changes, or is abandoned."""
        self.clients: Callable[[], float] = lambda: math.inf
        """Returns the number of clients: when all of them wait for an answer, waiting for more
        requests has no use.
        """
        self.cut_off = 0
        """Requests that the server stopped before they were answered."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Returns whether the queue has no free place."""
        return self.waiting >= self._settings.queue

    async def ask(self, request: ServedRequest, gone: asyncio.Future[None] | None = None) -> bytes:
        """Returns the answer as JSON.

        Args:
            request: What to answer.
            gone: Done when the client has disconnected; then the request is dropped, whether it waits or is computed.

        Raises:
            ClientGoneError: the client has disconnected.
            QueueFullError: too many wait already.
            TimeoutError: the deadline has passed.
            Exception: what the model raised.
        """
        if self.full:
            batches = math.ceil(self.waiting / self._max_batch)
            raise QueueFullError(max(1, math.ceil(batches * self._seconds)))
        loop = asyncio.get_running_loop()
        each = _Waiting(request, request.group(), loop.create_future(), loop.time())
        self._waiting.append(each)
        self._changed.set()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                awaited: list[asyncio.Future[Any]] = [each.future] if gone is None else [each.future, gone]
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not each.future.done():
                raise ClientGoneError
            return each.future.result()
        finally:
            each.future.cancel()
            with suppress(ValueError):  # its turn has come
                self._waiting.remove(each)
            self._abandon()

    async def run(self) -> None:
        """Computes batches until it is cancelled."""
        # A daemon: a batch that does not end must not keep the process from ending.
        self._thread = threading.Thread(target=self._compute, name="model", daemon=True)
        self._thread.start()
        loop = asyncio.get_running_loop()
        while True:
            batch, began = await self._next(), loop.time()
            self._began(len(batch))
            done = loop.create_future()
            self._work.put((batch, done))
            await done
            self._seconds = loop.time() - began

    async def _next(self) -> list[_Waiting]:
        """The oldest request with others of its group, once there are enough of them or it has waited long enough."""
        loop, settings = asyncio.get_running_loop(), self._settings
        while True:
            left: float | None = None
            if self._waiting:
                first = self._waiting[0]
                alike = [each for each in self._waiting if each.group == first.group][: self._max_batch]
                left = first.since + settings.wait_ms / 1e3 - loop.time()
                if len(alike) == self._max_batch or left <= 0 or self.waiting >= self.clients():
                    taken = set(alike)
                    self._waiting = [each for each in self._waiting if each not in taken]
                    return alike
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _compute(self) -> None:
        while True:
            batch, done = self._work.get()
            answers = self._answers_unless_abandoned(batch)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                done.get_loop().call_soon_threadsafe(_hand_out, batch, answers, done)

    def _answers_unless_abandoned(self, batch: list[_Waiting]) -> Sequence[Answer]:
        """The answers to a batch; errors for all of it if it was abandoned."""
        try:
            try:
                with self._changes:
                    self._computed = batch
                return self._answers([each.request for each in batch])
            finally:
                self._end_of_batch()
        except _AbandonedError:
            self._end_of_batch()  # it may have been raised inside the ``finally``
            return [ClientGoneError()] * len(batch)

    def _end_of_batch(self) -> None:
        with self._changes:
            self._computed = []
            _raise_in_thread(threading.get_ident(), None)  # takes back what was not raised yet

    def _abandon(self) -> None:
        """Ends the batch that is being computed if no client waits for any of its answers."""
        with self._changes:
            nobody_waits = all(each.future.done() for each in self._computed)
            if self._computed and nobody_waits and self._thread is not None and self._thread.ident is not None:
                _raise_in_thread(self._thread.ident, _AbandonedError)


def _raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    """Raises an exception at the next line of Python that a thread executes; None takes it back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _hand_out(batch: Sequence[_Waiting], answers: Sequence[Answer], done: asyncio.Future[None]) -> None:
    for each, answer in zip(batch, answers, strict=True):
        if each.future.done():  # its deadline has passed
            continue
        if isinstance(answer, Exception):
            each.future.set_exception(answer)
        else:
            each.future.set_result(answer)
    if not done.done():
        done.set_result(None)
