"""MLflow's own page for a workspace, on this machine only."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.system.errors import ExitCode, RunnerError
from runner.system.python import PYTHON, safe_environment
from runner.tracking.connection import connect, is_http, quiet_environment, shown
from runner.tracking.links import experiments_page
from runner.tracking.workspace import Workspace

HOST = "127.0.0.1"
PORT = 5000
_START_SECONDS = 60.0


def serve(workspace: Workspace, port: int = PORT, announce: Callable[[str], object] = print) -> None:
    """Shows the runs of a workspace in MLflow's page until it is interrupted.

    The page has no password, so it listens on 127.0.0.1 alone. Where ``MLFLOW_TRACKING_URI`` is a server, that server
    has the page already and only its address is announced.

    Args:
        workspace: whose runs to show.
        port: the port to listen on; another free one is used if it is taken.
        announce: receives the address once the page answers.

    Raises:
        StorageError: the workspace's database cannot be opened.
        RunnerError: the server ended by itself.
        KeyboardInterrupt: the user has had enough; the server is stopped.
    """
    uri = workspace.tracking_uri
    if is_http(uri):
        announce(experiments_page(shown(uri)))
        return
    connect(uri)  # creates or refuses the database here, with our messages, and not in the server
    address = f"http://{HOST}:{_free_port(port)}"
    log = workspace.root / "ui.log"
    with _running_server(workspace, address, log) as server:
        _wait_until_ready(server, address, log)
        announce(experiments_page(address))
        raise RunnerError(f"MLflow's server ended by itself with exit code {server.wait()}; see {log}")


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just left is free, one in use is not
        try:
            probe.bind((HOST, port))
        except OSError:
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running_server(workspace: Workspace, address: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the server and stops it however this process is asked to end."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    try:
        server = _start(workspace, address, log)
        try:
            yield server
        finally:
            _stop(server)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start(workspace: Workspace, address: str, log: Path) -> subprocess.Popen[bytes]:
    import mlflow

    command = [*PYTHON, "-W", "ignore", "-m", "mlflow", "server", "--workers", "1"]
    command += ["--default-artifact-root", workspace.artifacts.as_uri(), "--no-serve-artifacts"]
    # Where its application lies; told nothing, uvicorn imports from the current directory.
    command += ["--uvicorn-opts", shlex.join(["--app-dir", str(Path(mlflow.__file__).parents[1])])]
    command += ["--host", HOST, "--port", address.rpartition(":")[2]]
    variables = {**quiet_environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **safe_environment()}
    variables["MLFLOW_BACKEND_STORE_URI"] = workspace.tracking_uri  # may hold a password, which a command line shows
    # A session of its own: the terminal's Ctrl-C reaches us alone, and we stop the server and its children together.
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()  # noqa: S310 (our own server)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise RunnerError(f"MLflow's server did not answer on {address}; see {log}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=10)
    except ProcessLookupError:
        pass
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
