"""Connections: how many there are, for whom each of them waits, and which of them end when there are too many."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.serve.responses import raw_error_response

SCARCE = "runner.connections_are_scarce"
"""Key of a request's scope: a function that returns whether there are more connections than are allowed."""
RESERVE = 64
"""Connections beyond the limit, on which only the health of the server can be queried."""
LINGER_S = 2.0
"""Seconds for which the server reads on after an error that closes the connection."""
FREE_PIECES = 1024
"""Pieces of a body of any size."""
SMALLEST_PIECE = 64
"""Mean length of further pieces, in bytes: each costs as much as a kilobyte that comes in one."""


class Connections:
    """The open connections of a server.

    A connection waits for its client (idle, or slow while a body is sent or an answer is read), or the server works
    for it. If there are more than ``limit``, those that wait for their clients end: idle ones first, the longest
    waiting first. Only if the server works for all of them, up to ``reserve`` more are open, and ``are_scarce``.

    Args:
        limit: Connections on which everything can be requested.
        reserve: Further connections.
    """

    def __init__(self, limit: int, reserve: int = RESERVE) -> None:
        self._limit = limit
        self._reserve = reserve
        self._open: set[Connection] = set()
        # Dictionaries, since their keys keep the order of insertion.
        self._idle: dict[Connection, None] = {}
        self._slow: dict[Connection, None] = {}

    @property
    def are_scarce(self) -> bool:
        """Whether more than ``limit`` are open, and none of them can end."""
        self._make_room()
        return len(self._open) > self._limit

    def add(self, connection: Connection) -> None:
        """Adds a new connection, for which others may end."""
        self._open.add(connection)
        self._make_room()
        if len(self._open) > self._limit + self._reserve:
            self._end(connection)
        else:
            self._idle[connection] = None

    def discard(self, connection: Connection) -> None:
        """Removes a connection that has been closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._slow.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Notes that the next request is expected; one that is idle already keeps its place."""
        self._move(connection, self._idle)

    def set_slow(self, connection: Connection) -> None:
        """Notes that a body or the reading of an answer is expected."""
        self._move(connection, self._slow)

    def set_busy(self, connection: Connection) -> None:
        """Notes that the server works."""
        self._idle.pop(connection, None)
        self._slow.pop(connection, None)

    def _move(self, connection: Connection, group: dict[Connection, None]) -> None:
        if connection in self._open and connection not in group:
            self.set_busy(connection)
            group[connection] = None

    def _make_room(self) -> None:
        while len(self._open) > self._limit and (self._idle or self._slow):
            self._end(next(iter(self._idle or self._slow)))

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
            RemoteProtocolError: A body has two lengths, by which requests can be smuggled past a proxy, or comes in
                pieces of a few bytes, each of which costs as much as a large one.
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
        self._has_refused = False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCARCE] = lambda: self.registry.are_scarce
        await self._inner(scope, receive, send)

    def connection_made(self, transport: Any) -> None:
        """Expects a request."""
        super().connection_made(transport)
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
        self._discarded = self._discarded + len(data) if is_late or self._has_refused else 0
        if self._discarded > self.most_discarded:
            self.transport.abort()
            return
        if self._has_refused:
            return
        super().data_received(data)
        self._expect()
        self._classify()

    def on_response_complete(self) -> None:
        """Expects the next request."""
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
        """Ends the connection in favour of others; a client whose request has begun gets an answer."""
        is_sending_body = self.cycle is not None and self.cycle.more_body and not self.cycle.response_started
        if self.transport.get_write_buffer_size():
            self.transport.abort()
            return
        if is_sending_body and not self._has_refused:
            self._refuse(503, "too many clients are connected")
        self.transport.close()

    def shutdown(self) -> None:
        """Ends the connection, or lets it end after the answer, when the server stops."""
        if self._has_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application and closes the connection when the client has read the answer."""
        has_begun = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing() or self._has_refused:
            return
        if has_begun and self.cycle.response_started:
            self.transport.abort()
            return
        self._has_refused = True
        self.transport.write(raw_error_response(status, message))
        if has_begun:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

        # Closing while the client sends would reset the connection before it has read the answer.
        self.flow.resume_reading()
        self.transport.write_eof()
        _cancel(self._head)
        self._head = self.loop.call_later(min(LINGER_S, self.patience), self.transport.abort)

    def _expect(self) -> None:
        """Starts the timer for the head of a request, or stops it when the head is complete."""
        if self._has_refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self.patience, self.transport.abort)

    def _classify(self) -> None:
        """Notes for whom the connection waits."""
        if self._has_refused or self.cycle is None:
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
