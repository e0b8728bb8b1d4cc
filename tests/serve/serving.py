"""Runs to serve, and servers in processes of their own."""

import json
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx2
from children import running, start
from running import settings_of

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.tracking import Workspace
from runner.training.outputs import NoOutput
from runner.training.run import run

PATIENCE_SECONDS = 120.0
"""For whatever another process does: a loaded machine is no reason to fail."""
TESTS = Path(__file__).parents[1]
PLUGINS = [TESTS / "toys.py", TESTS / "serve" / "obedient.py"]
OBEDIENT = """
name: obedient
device: cpu
model: {kind: toy_obedient}
data: {kind: toy_words}
train: {updates: 4, batch_size: 8}
tracking: {system_metrics: false}
"""


def workspace_with(folder, database):
    """A workspace in a folder, whose database needs no migration."""
    (folder / ".runner").mkdir(parents=True)
    shutil.copy(database, folder / ".runner" / "mlflow.db")
    return Workspace(folder / ".runner")


def trained(workspace, recipe, *sets, plugins=()):
    """The folder of a run."""
    registry = Registry(plugins)
    return Path(run(load(recipe, sets, registry), registry, workspace, NoOutput()).run_dir)


def small(workspace, name):
    """The same of a recipe that ships, made small."""
    return trained(workspace, TESTS.parent / "recipes" / f"{name}.yaml", *settings_of(name))


def obedient(workspace):
    """The same of the learner that answers when it is told to."""
    recipe = workspace.root.parent / "obedient.yaml"
    recipe.write_text(OBEDIENT)
    return trained(workspace, recipe, plugins=PLUGINS)


@contextmanager
def server(workspace, run_dir, *settings):
    """A server of a run's model on a free port, while the block lasts: its process and a client."""
    arguments = ["serve", run_dir.name, "--port", "0", *settings]
    with running(start(workspace.root.parent / "said", *arguments, RUNNER_WORKSPACE=str(workspace.root))) as child:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(r"answers on (http://\S+)", child.stderr if child.err.exists() else "")) is None:
            assert child.running, child.stderr
            assert time.monotonic() < deadline, child.stderr
            time.sleep(0.02)
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
        with httpx2.Client(base_url=found[1], timeout=PATIENCE_SECONDS, limits=limits, trust_env=False) as client:
            yield child, client


def asked_together(client, questions, at_once=16):
    """The responses to questions of which so many are asked at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda question: client.post("/predict", json=question), questions))


class Asking(Thread):
    """A question that is asked while something else happens."""

    def __init__(self, client, question):
        super().__init__()
        self._client, self._question = client, question
        self.start()

    def run(self):
        self.response = self._client.post("/predict", json=self._question)

    def answered(self):
        self.join(PATIENCE_SECONDS)
        return self.response


def until(condition):
    """Waits for something that another process does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(client, name):
    """The value of a counter of the server; 0 where there is none yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@contextmanager
def connected(client):
    """A connection on which anything can be sent."""
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address, timeout=PATIENCE_SECONDS / 2) as connection:
        yield connection


def received(connection):
    """Everything until the server ends the connection."""
    parts = []
    while data := connection.recv(65536):
        parts.append(data)
    return b"".join(parts).decode()


def left(client, **question):
    """Returns a connection on which a request was sent: closing it abandons the request."""
    body = json.dumps(question).encode()
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection = socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)
    connection.sendall(head % len(body) + body)
    return connection
