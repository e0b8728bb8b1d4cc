"""Middleware around all routes: allowed hosts, limits, security headers and errors of plugins."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.recipe.recipe import ServeConfig
from runner.serve.connections import SURPLUS
from runner.serve.model import log_failure
from runner.serve.responses import SECURITY_HEADERS, error_response, failure_response

RESERVED_PATHS = frozenset({"/health", "/ready"})
"""Paths that are answered also when connections are scarce."""
HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]*)?")
"""A Host header in lower case: an address of IPv6 in brackets, or a name or an address of IPv4; and a port."""
_LOCAL_NAME = re.compile(r"(?!xn--)[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
"""A name without a dot, as ``localhost``; no number, and no letters beyond ASCII in disguise."""
ANY_HOST = "*"


class Guard:
    """Middleware that refuses what no route should see, and completes the headers of every answer.

    Args:
        app: The application.
        settings: Allowed hosts.
        answered: Called with path, status and seconds of every answer when it starts.
    """

    def __init__(self, app: ASGIApp, settings: ServeConfig, answered: Callable[[str, int, float], object]) -> None:
        self._app = app
        self._hosts = frozenset(name.lower() for name in (settings.host, *settings.hosts))
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        start = loop.time()
        has_started = False

        async def guarded(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._answered(scope["path"], message["status"], loop.time() - start)
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if "location" in headers:
                    headers["location"] = _relative(headers["location"])
            await send(message)

        try:
            refusal = self._refusal(scope)
            await (refusal or self._app)(scope, receive, guarded)
        except Exception as error:
            log_failure(error)
            # An answer that has started cannot be replaced by another one.
            if not has_started:
                await failure_response(error)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """Returns the answer to a request that no route sees; None for all others."""
        host = Headers(scope=scope).get("host")
        # HTTP/1.0 requires no Host header, and browsers always send one.
        if host is not None and not self._is_allowed(host, scope):
            return error_response(400, f"host: {host!r} is not served here; add it to serve.hosts")
        if scope["path"] not in RESERVED_PATHS and scope[SURPLUS]():
            return error_response(503, "too many clients are connected")
        return None

    def _is_allowed(self, host: str, scope: Scope) -> bool:
        """Returns whether a request with this Host is meant for this server.

        A page of another site whose name resolves to this address (DNS rebinding) sends that site's
        name, which has a dot. Names without one are those of a local network or of containers.
        """
        if ANY_HOST in self._hosts:
            return True
        match = HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = (match["address"] or match["name"]).removesuffix(".")
        if name in self._hosts or _LOCAL_NAME.fullmatch(name):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        local_address = scope["server"][0] if scope.get("server") else None
        return address.is_loopback or str(address) == local_address


def _relative(location: str) -> str:
    """Returns a redirect to this server without its name, which comes from the client."""
    parts = urlsplit(location)
    # Two slashes at the beginning would be the name of another server.
    path = "/" + parts.path.lstrip("/\\")
    return path + (f"?{parts.query}" if parts.query else "")
