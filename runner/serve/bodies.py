"""The bodies of requests: limited in length, in time and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import HTTPException
from starlette.requests import Request

from runner.recipe.recipe import ServeConfig

SMALL_BODY = 2**16
"""Bytes up to which a body needs no place among the large ones."""
LARGE_BODIES = 16
"""Larger bodies that are in memory at the same time, at most."""
CLOSE = {"connection": "close"}


class Bodies:
    """Receives the bodies of requests.

    At most ``LARGE_BODIES`` bodies above ``SMALL_BODY`` bytes are held. When another one arrives, the one that has been
    arriving for longest is refused, so that clients that send slowly do not keep out the others.

    Args:
        settings: Limits on length and time.
    """

    def __init__(self, settings: ServeConfig) -> None:
        self._longest = settings.max_body_bytes
        self._seconds = settings.client_s
        self._large: dict[asyncio.Timeout, bool] = {}
        """The timeouts of large bodies, the oldest first, and whether the body is complete."""

    @asynccontextmanager
    async def received(self, http: Request) -> AsyncIterator[bytearray]:
        """Yields the complete body; memory is accounted until the block ends.

        Raises:
            HTTPException: 408, 413, 415 or 503.
            ClientDisconnect: The client has gone.
        """
        _check_headers(http)
        declared = http.headers.get("content-length", "0")
        # A declared length may have more digits than Python converts.
        if declared.isdecimal() and (len(declared) > len(str(self._longest)) or int(declared) > self._longest):
            raise self._too_long(http)

        timeout = asyncio.timeout(self._seconds)
        try:
            yield await self._read(http, timeout)
        finally:
            self._large.pop(timeout, None)

    async def _read(self, http: Request, timeout: asyncio.Timeout) -> bytearray:
        body = bytearray()
        is_large = False
        try:
            async with timeout:
                async for piece in http.stream():
                    body += piece
                    if len(body) > self._longest:
                        raise self._too_long(http)
                    if len(body) > SMALL_BODY and not is_large:
                        self._make_place()
                        self._large[timeout] = False
                        is_large = True
        except TimeoutError:
            if is_large and timeout not in self._large:
                raise _too_many() from None
            message = f"the body did not come within {self._seconds:g} s"
            raise HTTPException(408, message, CLOSE) from None
        if is_large:
            self._large[timeout] = True
        return body

    def _make_place(self) -> None:
        """Ends the oldest incomplete body if all places are taken."""
        if len(self._large) < LARGE_BODIES:
            return
        oldest = next((timeout for timeout, is_complete in self._large.items() if not is_complete), None)
        if oldest is None:
            raise _too_many()
        del self._large[oldest]
        # The timeout expires in the task that reads that body, which then refuses it.
        oldest.reschedule(asyncio.get_running_loop().time())

    def _too_long(self, http: Request) -> HTTPException:
        # Without this header the rest of the body is read and dropped, so that the client can read the answer. One that
        # waits for "100 Continue" has not sent anything yet.
        headers = CLOSE if "expect" in http.headers else None
        return HTTPException(413, f"the body is longer than {self._longest:,} bytes", headers)


def _check_headers(http: Request) -> None:
    """Raises 415 for a body that is not declared as plain JSON in UTF-8; other sites' forms cannot declare it."""
    media_type, _, parameters = http.headers.get("content-type", "").lower().partition(";")
    subtype = media_type.strip().partition("application/")[2]
    if subtype != "json" and not subtype.endswith("+json"):
        raise HTTPException(415, f"content-type: should be application/json, got {media_type.strip() or 'none'!r}")

    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "')
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise HTTPException(415, f"content-type: the charset should be utf-8, got {charset!r}")

    encoding = http.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise HTTPException(415, f"content-encoding: bodies are not decoded, got {encoding!r}")


def _too_many() -> HTTPException:
    return HTTPException(503, "too many large bodies arrive at the same time", CLOSE)
