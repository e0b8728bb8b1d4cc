"""MLflow's page for a workspace, on this machine only."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from runner.system.errors import ExitCode, RunnerError
from runner.system.files import is_writable, open_file
from runner.system.processes import PYTHON, safe_environment
from runner.tracking.access import is_http
from runner.tracking.mlflow_view import SHARED, TAG
from runner.tracking.store import HOST, PORT, QUIET, VIEW, Store, shown
from runner.tracking.workspace import Workspace


def serve(
    workspace: Workspace,
    announce: Callable[[str], object],
    port: int = PORT,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Shows the runs of a workspace in MLflow's page until it is interrupted.

    The page has no password, so it listens on 127.0.0.1 alone, on another free port if the wanted one is taken. If
    ``MLFLOW_TRACKING_URI`` is a server, that server has the page already.

    Args:
        workspace: The workspace with the runs.
        announce: Called with the address when the page answers.
        port: The port to try first.
        phase: Returns a context in which a description of the current work is shown.

    Raises:
        RunnerError: The database cannot be opened, or the server ends by itself.
    """
    uri = workspace.tracking_uri
    if is_http(uri):
        announce(f"{shown(uri).rstrip('/')}/#/experiments?{VIEW}")
        return
    with phase("opening the database"):
        # Refused here with our messages, and not by the server.
        store = Store(workspace, reading=workspace.database.exists())
    port = _free_port(port)
    address = f"http://{HOST}:{port}"
    log = workspace.root / "ui.log"
    if not is_writable(log):
        log = Path(tempfile.gettempdir(), f"runner-ui-{os.getpid()}.log")
    with _running_server(workspace, store.uri, port, log) as server:
        # On a busy machine it takes minutes to start. The bar shows the seconds, and Ctrl-C ends the wait.
        with phase(f"waiting for MLflow's server on {address}"):
            while not _answers(address):
                if server.poll() is not None:
                    raise RunnerError(f"MLflow's server ended before it answered on {address}; see {log}")
                time.sleep(0.2)
        announce(page_of(store, address))
        raise RunnerError(f"MLflow's server ended by itself with exit code {server.wait()}; see {log}")


def page_of(store: Store, address: str) -> str:
    """Returns the address of the newest run's experiment, if it has the view for
    that; else that of all experiments.
    """
    experiments = store.client.search_experiments()
    newest_runs = store.client.search_runs(
        [experiment.experiment_id for experiment in experiments],
        max_results=1,
        order_by=["attributes.start_time DESC"],
    )
    ids_with_view = {experiment.experiment_id for experiment in experiments if TAG in experiment.tags}
    for run in newest_runs:
        experiment_id = run.info.experiment_id
        if experiment_id in ids_with_view:
            return f"{address}/#/experiments/{experiment_id}/runs?{SHARED}&{VIEW}"
    return f"{address}/#/experiments?{VIEW}"


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        # A port that was in use until a moment ago is free, one in use is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running_server(workspace: Workspace, uri: str, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the server and stops it for any end of this process."""
    import mlflow

    command = [*PYTHON, "-W", "ignore", "-m", "mlflow", "server", "--workers", "1"]
    command += ["--default-artifact-root", workspace.artifacts.as_uri(), "--no-serve-artifacts"]
    # The folder of its application; without it, uvicorn imports from the current directory.
    command += ["--uvicorn-opts", shlex.join(["--app-dir", str(Path(mlflow.__file__).parents[1])])]
    command += ["--host", HOST, "--port", str(port)]
    variables = {**QUIET, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **safe_environment()}
    # Not in the command line, which other users can read: it may contain a password.
    variables["MLFLOW_BACKEND_STORE_URI"] = uri
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    server = None
    try:
        # A signal while it starts would leave a server that nobody stops.
        with _signals_deferred(), open(open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as output:
            # A separate session: the terminal's Ctrl-C reaches only this process, which
            # stops the server with its children.
            server = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        yield server
    finally:
        if server is not None:
            _stop(server)
        signal.signal(signal.SIGTERM, previous)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the server with its children."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handles SIGINT and SIGTERM at the end of the ``with``."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)


def _answers(address: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(f"{address}/health", timeout=5).close()  # noqa: S310 (our own server)
        return True
    return False
