"""Limits the number of connections: records whether each waits for its client, and
closes some when there are too many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.serve.responses import raw_error_response

SURPLUS = "runner.is_surplus"
"""Key of a request's scope: a function that returns whether the server works for too many others."""
RESERVE = 64
"""Connections beyond the limit, on which only the health of the server can be queried."""
GRACE_S = 0.1
"""Seconds for which a client is waited for even if connections are scarce: its request may be on the way."""
FREE_PIECES = 1024
"""Pieces of a body of any size."""
SMALLEST_PIECE = 64
"""Mean length of further pieces, in bytes: each costs as much as a kilobyte that comes in one."""


class Connections:
    """The open connections of a server.

    A connection waits for its client (idle, or slow while a body is sent or an answer is read), or
    the server works for it. If there are more than ``limit``, those that wait for their clients are
    closed: idle ones first, the longest waiting first. Only if the others are busy or have just
    started to wait, up to ``reserve`` more are open.

    Args:
        limit: Connections for which the server may work at the same time.
        reserve: Further connections, so that the health of a busy server can be queried.
        clock: Returns the time in seconds.
    """

    def __init__(self, limit: int, reserve: int = RESERVE, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._reserve = reserve
        self._clock = clock
        self._open: set[Connection] = set()
        # Since when each waits. The order is that of insertion, so the first one has waited for longest.
        self._idle: dict[Connection, float] = {}
        self._slow: dict[Connection, float] = {}
        self._surplus: set[Connection] = set()

    def is_surplus(self, connection: Connection) -> bool:
        """Returns whether the server works for ``limit`` others, and did so when this connection became busy."""
        if connection in self._idle or connection in self._slow:
            return self._busy_count >= self._limit
        return connection in self._surplus

    @property
    def _busy_count(self) -> int:
        return len(self._open) - len(self._idle) - len(self._slow)

    def add(self, connection: Connection) -> None:
        """Adds a new connection, for which others may end."""
        self._open.add(connection)
        self._make_room()
        if len(self._open) > self._limit + self._reserve:
            self._end(connection)
        else:
            self._idle[connection] = self._clock()

    def discard(self, connection: Connection) -> None:
        """Removes a connection that has been closed."""
        self._open.discard(connection)
        self._forget(connection)

    def set_idle(self, connection: Connection) -> None:
        """Notes that the next request is expected; one that is idle already keeps its place."""
        self._move(connection, self._idle)

    def set_slow(self, connection: Connection) -> None:
        """Notes that a body or the reading of an answer is expected."""
        self._move(connection, self._slow)

    def set_busy(self, connection: Connection) -> None:
        """Notes that the server works."""
        if connection in self._idle or connection in self._slow:
            self._forget(connection)
            if self._busy_count > self._limit:
                self._surplus.add(connection)

    def _move(self, connection: Connection, group: dict[Connection, float]) -> None:
        if connection in self._open and connection not in group:
            self._forget(connection)
            group[connection] = self._clock()

    def _forget(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._slow.pop(connection, None)
        self._surplus.discard(connection)

    def _make_room(self) -> None:
        while len(self._open) > self._limit and (connection := self._replaceable()) is not None:
            self._end(connection)

    def _replaceable(self) -> Connection | None:
        """Returns the connection that ends next for a new one."""
        is_full = len(self._open) > self._limit + self._reserve
        latest = self._clock() - (0 if is_full else GRACE_S)
        for group in (self._idle, self._slow):
            for connection, start in group.items():
                if start <= latest:
                    return connection
                break
        return None

    def _end(self, connection: Connection) -> None:
        self.discard(connection)
        connection.end()


class CarefulParser(h11.Connection):
    """h11's parser, which refuses two more kinds of requests."""

    reason = ""
    """Why a request is not valid."""
    _pieces = 0
    _length = 0

    def next_event(self) -> Any:
        """Returns the next event.

        Raises:
            RemoteProtocolError: A body has two lengths, which allows requests to
                be smuggled past a proxy, or arrives in pieces of a few bytes,
                each of which costs as much as a large one.
        """
        try:
            event = super().next_event()
            self._check(event)
        except h11.RemoteProtocolError as error:
            self.reason = str(error)
            raise
        return event

    def _check(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding are given")
            self._pieces = self._length = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._length += len(event.data)
            if self._pieces > FREE_PIECES + self._length / SMALLEST_PIECE:
                raise h11.RemoteProtocolError("the pieces of the body are too small")


class LingeringTransport:
    """A transport that can leave closing to the connection.

    Args:
        transport: asyncio's transport.
        close: Called instead of its ``close``.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's protocol, with limits on what a client can make the server wait for and read."""

    patience: ClassVar[float]
    """Seconds in which a client has to finish a head, and to read an answer."""
    most_discarded: ClassVar[int]
    """Bytes that are read and dropped after an answer."""
    registry: ClassVar[Connections]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: CarefulParser = CarefulParser(h11.SERVER)
        self._inner = self.app
        self.app = self._answer
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._discarded = 0
        self._lingers = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SURPLUS] = lambda: self.registry.is_surplus(self)
        await self._inner(scope, receive, send)

    def connection_made(self, transport: Any) -> None:
        """Expects a request."""
        self._raw_transport = transport
        super().connection_made(LingeringTransport(transport, self._close))  # type: ignore[arg-type]
        self._expect()
        self.registry.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expects nothing any more."""
        _cancel(self._head)
        _cancel(self._reading)
        self.registry.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request, or drops a part of a body that has been answered already."""
        is_late = self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY
        self._discarded = self._discarded + len(data) if is_late or self._lingers else 0
        if self._discarded > self.most_discarded:
            self.transport.abort()
            return
        if self._lingers:
            return
        super().data_received(data)
        self._expect()
        self._classify()

    def on_response_complete(self) -> None:
        """Expects the next request."""
        self.registry.set_idle(self)
        super().on_response_complete()
        self._classify()

    def pause_writing(self) -> None:
        """Expects the client to read what was sent."""
        self.flow.pause_writing()
        self._reading = self.loop.call_later(self.patience, self.transport.abort)
        self._classify()

    def resume_writing(self) -> None:
        """Continues to send."""
        self.flow.resume_writing()
        _cancel(self._reading)
        self._reading = None
        self._classify()

    def send_400_response(self, msg: str) -> None:
        """Refuses a request that is not valid HTTP, with h11's reason instead of uvicorn's message."""
        self._refuse(400, f"the request is not valid HTTP: {self.conn.reason}")

    def end(self) -> None:
        """Closes the connection in favour of others; a client that has started a
        request gets an answer.
        """
        is_sending_body = self.cycle is not None and self.cycle.more_body and not self.cycle.response_started
        if self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if is_sending_body and not self._lingers:
            self._refuse(503, "too many clients are connected")
        self._raw_transport.close()

    def shutdown(self) -> None:
        """Ends the connection, or lets it end after the answer, when the server stops."""
        if self._lingers:
            self.transport.abort()
        else:
            super().shutdown()

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application and closes the connection when the client has read the answer."""
        has_begun = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or self._lingers:
            return
        if has_begun and self.cycle.response_started:
            self.transport.abort()
            return
        self.transport.write(raw_error_response(status, message))
        if has_begun:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._linger()

    def _close(self) -> None:
        """Closes the connection, if the client has sent its request completely."""
        if self.cycle is None or not self.cycle.more_body or self._lingers or self._raw_transport.is_closing():
            self._raw_transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Sends nothing more, but reads on: closing would reset the connection before the client reads the answer."""
        self._lingers = True
        self.flow.resume_reading()
        self._raw_transport.write_eof()
        _cancel(self._head)
        self._head = self.loop.call_later(self.patience, self._raw_transport.abort)

    def _expect(self) -> None:
        """Starts the timer for the head of a request, or stops it when the head is complete."""
        if self._lingers:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self.patience, self.transport.abort)

    def _classify(self) -> None:
        """Records whether the connection waits for its client."""
        if self._lingers or self.cycle is None:
            self.registry.set_idle(self)
        elif self.flow.write_paused or (self.cycle.more_body and not self.cycle.response_complete):
            self.registry.set_slow(self)
        elif self.cycle.response_complete:
            self.registry.set_idle(self)
        else:
            self.registry.set_busy(self)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
