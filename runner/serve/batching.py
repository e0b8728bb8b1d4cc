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

from runner.plugin.configs import ServedRequest
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
class _PendingRequest:
    request: ServedRequest
    group: Hashable
    future: asyncio.Future[bytes]
    arrival: float
    """On the clock of the event loop."""


class Batcher:
    """Collects requests of equal groups into batches. Each copy of the model computes one batch
    after another in its own thread.
    """

    def __init__(self, copies: Sequence[Answers], settings: ServeConfig, on_batch: Callable[[int], object]) -> None:
        """Stores the arguments.

        Args:
            copies: Each computes batches in one thread, at the same time as the others.
            settings: Sizes and waiting times.
            on_batch: Called with the size of every batch when it starts.
        """
        self._threads = [_ModelThread(answers) for answers in copies]
        self._settings = settings
        self._on_batch = on_batch
        self._max_batch = 1 if settings.bit_exact else settings.max_batch
        self._waiting: list[_PendingRequest] = []
        self._computed = 0
        """Requests that are being computed."""
        self._changed = asyncio.Event()
        self._seconds = 0.0
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
            turns = math.ceil(batches / len(self._threads))
            raise QueueFullError(max(1, math.ceil(turns * self._seconds)))
        loop = asyncio.get_running_loop()
        pending = _PendingRequest(request, request.group(), loop.create_future(), loop.time())
        self._waiting.append(pending)
        self._changed.set()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                awaited: list[asyncio.Future[Any]] = [pending.future]
                if gone is not None:
                    awaited.append(gone)
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not pending.future.done():
                raise ClientGoneError
            return pending.future.result()
        finally:
            pending.future.cancel()
            # It may be in a batch already.
            with suppress(ValueError):
                self._waiting.remove(pending)
            for thread in self._threads:
                thread.abandon()

    async def run(self) -> None:
        """Computes batches until it is cancelled."""
        free = asyncio.Queue[_ModelThread]()
        for thread in self._threads:
            thread.start()
            free.put_nowait(thread)
        async with asyncio.TaskGroup() as tasks:
            while True:
                thread = await free.get()
                batch = await self._next()
                self._computed += len(batch)
                self._on_batch(len(batch))
                tasks.create_task(self._compute(batch, thread, free))

    async def _compute(
        self,
        batch: list[_PendingRequest],
        thread: _ModelThread,
        free: asyncio.Queue[_ModelThread],
    ) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await thread.compute(batch)
        self._seconds = loop.time() - start
        self._computed -= len(batch)
        free.put_nowait(thread)

    async def _next(self) -> list[_PendingRequest]:
        """The oldest request with others of its group, once there are enough of them or it has waited long enough."""
        loop = asyncio.get_running_loop()
        patience = self._settings.wait_ms / 1e3
        while True:
            remaining: float | None = None
            if self._waiting:
                oldest = self._waiting[0]
                group = [pending for pending in self._waiting if pending.group == oldest.group]
                batch = group[: self._max_batch]
                remaining = oldest.arrival + patience - loop.time()
                is_full = len(batch) == self._max_batch
                has_all = self.waiting + self._computed >= self.clients()
                if is_full or remaining <= 0 or has_all:
                    self._remove(batch)
                    return batch
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._changed.wait()

    def _remove(self, batch: Sequence[_PendingRequest]) -> None:
        # A set, because removing them one by one takes quadratic time.
        removed = set(batch)
        self._waiting = [pending for pending in self._waiting if pending not in removed]


class _ModelThread:
    """A thread in which one copy of the model computes batches."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._work: SimpleQueue[tuple[list[_PendingRequest], asyncio.Future[None]]] = SimpleQueue()
        self._computed: list[_PendingRequest] = []
        """The batch that is being computed."""
        self._changes = threading.Lock()
        """Held while that batch changes, or is abandoned."""
        # A daemon: a batch that does not end must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def compute(self, batch: list[_PendingRequest]) -> None:
        """Computes a batch and sets the results of its requests."""
        done = asyncio.get_running_loop().create_future()
        self._work.put((batch, done))
        await done

    def abandon(self) -> None:
        """Ends the batch that is being computed if no client waits for any of its answers."""
        with self._changes:
            if not self._computed or not all(pending.future.done() for pending in self._computed):
                return
            if self._thread.ident is not None:
                _raise_in_thread(self._thread.ident, _AbandonedError)

    def _run(self) -> None:
        while True:
            batch, done = self._work.get()
            answers = self._answers_unless_abandoned(batch)
            # The loop may have been closed meanwhile.
            with suppress(RuntimeError):
                done.get_loop().call_soon_threadsafe(_hand_out, batch, answers, done)

    def _answers_unless_abandoned(self, batch: list[_PendingRequest]) -> Sequence[Answer]:
        """Returns the answers to a batch; errors for all of it if it was abandoned."""
        try:
            try:
                with self._changes:
                    self._computed = batch
                return self._answers([pending.request for pending in batch])
            finally:
                self._end_of_batch()
        except _AbandonedError:
            # It may have been raised inside the ``finally``.
            self._end_of_batch()
            return [ClientGoneError()] * len(batch)

    def _end_of_batch(self) -> None:
        with self._changes:
            self._computed = []
            # Takes back an exception that was not raised yet.
            _raise_in_thread(threading.get_ident(), None)


def _raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    """Raises an exception at the next line of Python that a thread executes; None takes it back."""
    exception = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def _hand_out(batch: Sequence[_PendingRequest], answers: Sequence[Answer], done: asyncio.Future[None]) -> None:
    for pending, answer in zip(batch, answers, strict=True):
        # The deadline may have passed.
        if pending.future.done():
            continue
        if isinstance(answer, Exception):
            pending.future.set_exception(answer)
        else:
            pending.future.set_result(answer)
    if not done.done():
        done.set_result(None)
