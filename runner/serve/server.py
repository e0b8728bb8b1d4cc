"""The server's process: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import torch
import uvicorn

from runner.recipe.recipe import ServeConfig
from runner.serve.app import make_app
from runner.serve.connections import RESERVE, Connection, Connections
from runner.serve.model import ServedModel
from runner.system.errors import ExitCode, UsageError

_log = logging.getLogger(__name__)

DISCARDED_BODIES = 16
"""Times the longest allowed body that is read and dropped, so that clients that send more can read the answer."""
OTHER_FILES = 128
"""Files that the process opens besides its connections."""


def bound(settings: ServeConfig) -> socket.socket:
    """A socket on the address of the settings, which does not listen yet; a ``UsageError`` if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With TCP as the protocol, asyncio disables the delay of small packets (40 ms per answer).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port that was in use until a moment ago is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        address = f"{settings.host}:{settings.port}"
        raise UsageError(f"cannot listen on {address}: {error.strerror or error}; name another serve.port") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_files(connections: int) -> int:
    """Raises the process's limit on open files for the connections, and returns how many fit into it."""
    needed = connections + RESERVE + OTHER_FILES
    # Each connection is an open file of the process.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections

    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    fitting = max(1, allowed - RESERVE - OTHER_FILES)
    if fitting < connections:
        _log.warning(
            "serve.connections: %d exceeds what the limit of %d open files allows; %d are accepted (ulimit -n)",
            connections,
            allowed,
            fitting,
        )
    return fitting


class AnnouncingServer(uvicorn.Server):
    """uvicorn's server, which announces its address when it accepts requests, and
    ends without killing its process.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self._announce = announce
        self.signals: list[int] = []
        """The signals that stopped it."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept requests."""
        await super().startup(sockets)
        self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stops at SIGTERM and Ctrl-C when all requests are answered; uvicorn's
        handler would raise the signal again.
        """
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous_handlers = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stores the signal, which determines the exit code."""
        self.signals.append(sig)
        super().handle_exit(sig, frame)


def serve(
    model: ServedModel,
    settings: ServeConfig,
    listener: socket.socket,
    announce: Callable[[str], object],
) -> ExitCode:
    """Answers requests until SIGTERM or Ctrl-C, and then the pending ones.

    Returns:
        0 if all of them were answered after SIGTERM, 130 after Ctrl-C; 143 if some took longer than ``drain_s``.
    """
    # Read by threads that begin later: those of the models share the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.parallel))
    app = make_app(model, settings)
    limits = {
        "patience": settings.client_s,
        "most_discarded": DISCARDED_BODIES * settings.max_body_bytes,
        "registry": Connections(allow_files(settings.connections)),
    }
    config = uvicorn.Config(
        app,
        # uvicorn creates one object of this class per connection, without arguments for limits.
        http=type("LimitedConnection", (Connection,), limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=settings.drain_s,
    )
    # The answers and the runner's messages contain what matters.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    server = AnnouncingServer(config, lambda: announce(address_of(listener)))
    # The server exists only after the application, which therefore gets the function later.
    app.state.batcher.clients = lambda: len(server.server_state.connections)
    # Existing objects are excluded from collections, which would block all
    # threads while a large body is parsed.
    gc.freeze()
    with closing(listener):
        asyncio.run(server.serve([listener]))
    if app.state.batcher.cut_off:
        return ExitCode.TERMINATED
    return ExitCode.INTERRUPTED if signal.SIGINT in server.signals else ExitCode.DONE
