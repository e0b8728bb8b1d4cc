import json
import math
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from run_folders import recipe

from runner.system.errors import StorageError
from runner.tracking import Workspace
from runner.tracking.store import Store
from runner.tracking.tracker import Tracker
from runner.tracking.ui import page_of, serve

SERVE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, also where tests run in the background
from runner.tracking import Workspace
from runner.tracking.ui import serve

serve(Workspace(), lambda address: print(address, flush=True), int(sys.argv[1]))
"""


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def server(migrated_workspace, taken_port, tmp_path):
    """Serves the workspace in a process of its own; yields the process and the address without the page.

    It stands in a folder whose Python files nobody asked for.
    """
    somewhere = tmp_path / "somewhere"
    somewhere.mkdir()
    for name in ("random", "uvicorn", "mlflow", "flask"):
        (somewhere / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    command = [sys.executable, "-P", "-c", SERVE, str(taken_port)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=somewhere)
    page = child.stdout.readline()
    yield child, page.partition("/#")[0]
    child.terminate()
    child.wait()
    child.stdout.close()


def test_page_and_api_answer_on_another_port_if_the_wanted_one_is_taken(server, taken_port, monkeypatch):
    child, address = server
    assert address.startswith("http://127.0.0.1:")
    assert address != f"http://127.0.0.1:{taken_port}"
    with urllib.request.urlopen(address) as page:
        assert b"<title>MLflow</title>" in page.read()

    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)  # a run that is tracked by this server
    tracker = Tracker.open(Workspace(), recipe(seed=1), {})
    tracker.log({"loss": math.inf, "return": 2.0}, 1)
    note = tracker.run_dir / "note.txt"
    note.write_text("kept")
    tracker.artifact(note)
    assert tracker.close("FINISHED")
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": ["1"]}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        (run,) = json.load(answer)["runs"]
    assert run["info"]["status"] == "FINISHED"
    assert {metric["key"]: metric["value"] for metric in run["data"]["metrics"]} == {"loss": "NaN", "return": 2}
    artifact = f"{address}/get-artifact?path=note.txt&run_uuid={tracker.run_id}"
    with urllib.request.urlopen(artifact) as answer:
        assert answer.read() == b"kept"

    child.send_signal(signal.SIGINT)
    child.wait(timeout=120)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address)


def test_a_tracking_server_has_the_page_already(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@tracking.example:8080/")
    addresses = []
    serve(Workspace(), addresses.append)
    (address,) = addresses
    assert address == "http://tracking.example:8080/#/experiments?workflowType=machine_learning"


def test_a_broken_database_is_refused_before_a_server_starts(isolated_workspace):
    isolated_workspace.mkdir()
    (isolated_workspace / "mlflow.db").write_text("this is no database, " * 100)
    with pytest.raises(StorageError, match="not a database"):
        serve(Workspace(), str)


@pytest.mark.usefixtures("migrated_workspace")
def test_the_page_opens_with_the_newest_run_among_its_like():
    store = Store(Workspace())
    address = "http://127.0.0.1:5000"
    assert page_of(store, address) == f"{address}/#/experiments?workflowType=machine_learning"
    Tracker.open(Workspace(), recipe(experiment="first"), {}).close("FINISHED")
    run = Tracker.open(Workspace(), recipe(experiment="second"), {})
    run.close("FINISHED")
    experiment_id = store.client.get_run(run.run_id).info.experiment_id
    opened = f"{address}/#/experiments/{experiment_id}/runs?viewStateShareKey=runner&workflowType=machine_learning"
    assert page_of(store, address) == opened


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("migrated_workspace")
def test_a_signal_while_the_server_starts_leaves_no_server(number, monkeypatch):
    started = []
    start_process = subprocess.Popen

    def interrupted(command, **options):
        started.append(start_process([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        signal.raise_signal(number)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    # A shell starts programs in the background with an ignored SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            serve(Workspace(), print)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert started[0].poll() == -signal.SIGTERM
