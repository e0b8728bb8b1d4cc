"""A real MLflow server that can be killed, and a way to it that can be slow."""

import os
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import uvicorn
from fork_server import CONTEXT, begin

from runner.tracking.store import QUIET


class Server:
    """MLflow's own server on loopback, over a SQLite file, in a child process that has imported everything."""

    def __init__(self, database, artifacts):
        # Keeps the port while no server runs: connections are refused, and no other process gets it.
        self._reservation = bound_socket(0)
        self.port = self._reservation.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._stores = (f"sqlite:///{database}", artifacts.as_uri())
        self._process = None

    def start(self):
        """Starts it and waits until it answers."""
        begin()
        environment = {**os.environ, **QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = CONTEXT.Process(target=_serve, args=(environment, *self._stores, self.port))
        self._process.start()
        deadline = time.monotonic() + 120
        while True:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return
            assert self._process.exitcode is None, "the server ended by itself"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)

    def kill(self):
        """Kills it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def close(self):
        """Kills it and gives its port back."""
        self.kill()
        self._reservation.close()


def bound_socket(port):
    """Returns a socket that has a port of loopback, which others like it may have too."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", port))
    return reserved


def _serve(environment, database, artifacts, port):
    """What ``mlflow server --no-serve-artifacts`` comes to, in this process."""
    os.environ.clear()
    os.environ.update(environment)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    from mlflow import server

    os.environ |= {server.BACKEND_STORE_URI_ENV_VAR: database, server.ARTIFACT_ROOT_ENV_VAR: artifacts}
    config = uvicorn.Config("mlflow.server.fastapi_app:app")
    uvicorn.Server(config).run(sockets=[bound_socket(port)])


@contextmanager
def server(database, artifacts):
    """A server that runs until the block ends."""
    each = Server(database, artifacts)
    try:
        each.start()
        yield each
    finally:
        each.close()


class SlowWay:
    """A proxy on loopback that holds every answer back for ``seconds``, and for ever while it hangs."""

    def __init__(self, port, seconds):
        self._port, self._seconds = port, seconds
        self.hanging = threading.Event()
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """Ends all connections."""
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self):
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                threading.Thread(target=self._pass, args=(near, far, 0.0), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, self._seconds), daemon=True).start()

    def _pass(self, source, target, seconds):
        with suppress(OSError):
            while data := source.recv(65536):
                time.sleep(seconds)
                if self.hanging.is_set():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def slow_way(port, seconds):
    """A proxy to a port of this machine."""
    way = SlowWay(port, seconds)
    try:
        yield way
    finally:
        way.close()
