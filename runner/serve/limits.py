"""What a client may ask of the server's patience: sizes of bodies, and seconds for sending and reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from runner.recipe.recipe import ServeConfig
from runner.serve.model import log_failure
from runner.system.secrets import redact

SOURCES = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'"
"""What a page may load: nothing from elsewhere."""


def said(status: int, message: str, **headers: str) -> JSONResponse:
    """An answer that is an error, in one line."""
    return JSONResponse({"error": message}, status, {name.replace("_", "-"): each for name, each in headers.items()})


def failed(error: Exception) -> JSONResponse:
    """An answer to a request in which the model's code raised something."""
    return said(500, f"the model failed: {type(error).__name__}: {redact(str(error)).partition(chr(10))[0]}")


class Guard:
    """Refuses bodies that are too long (413), and those that do not come (408); says what a page may load."""

    def __init__(self, app: ASGIApp, settings: ServeConfig, answered: Callable[[str, int, float], object]) -> None:
        """Guards an application; ``answered`` is told path, status and seconds of every answer that begins."""
        self._app, self._settings, self._answered = app, settings, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = asyncio.get_running_loop().time()
        most, length = self._settings.max_body_bytes, Headers(scope=scope).get("content-length", "0")
        too_long = f"the body is longer than {most:,} bytes"
        started = False

        async def guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(scope["path"], message["status"], asyncio.get_running_loop().time() - began)
                headers = MutableHeaders(scope=message)
                headers.update({"content-security-policy": SOURCES, "x-content-type-options": "nosniff"})
            await send(message)

        if length.isdecimal() and int(length) > most:
            await said(413, too_long, connection="close")(scope, receive, guarded)
            return
        deadline = began + self._settings.client_s
        received, complete = 0, False

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # what comes now says that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                slow = f"the body did not come within {self._settings.client_s:g} s"
                raise HTTPException(408, slow, {"connection": "close"}) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > most:
                raise HTTPException(413, too_long, {"connection": "close"})
            return message

        try:
            await self._app(scope, limited, guarded)
        except Exception as error:  # of a plugin, while a request was validated for example
            log_failure(error)
            if not started:
                await failed(error)(scope, limited, guarded)


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which ends connections whose client neither finishes a head nor reads an answer."""

    patience: ClassVar[float]
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Expects a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Expects the rest of the head, as long as it is not complete."""
        super().data_received(data)
        self._expect()

    def pause_writing(self) -> None:
        """Expects the client to read what was sent."""
        self.flow.pause_writing()
        self._reading = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read it."""
        self.flow.resume_writing()
        _end(self._reading)
        self._reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        _end(self._head)
        _end(self._reading)
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            _end(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(self.patience, self.transport.abort)


def _end(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
