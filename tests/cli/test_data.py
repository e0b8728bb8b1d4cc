"""Published files: listed, fetched over HTTP from this machine, checked, found."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running import forked

from runner.plugin.files import DataFile, fetch, find
from runner.system.errors import RunnerError

CONTENT = b"All the world's a stage. " * 400


@pytest.fixture
def server():
    """Serves ``CONTENT``, or half of it, or nothing; counts what it is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path == "/missing":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[: len(CONTENT) // 2] if self.path == "/torn" else CONTENT)

        def log_message(self, *arguments):
            pass

    asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.asked = asked
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data"


def published(server, path="/play.txt", content=CONTENT):
    digest = hashlib.sha256(content).hexdigest()
    return DataFile("plays/play.txt", f"http://127.0.0.1:{server.server_port}{path}", digest, len(content), "A play")


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_once_and_found(server, data):
    file = published(server)
    assert find(file.name, None, [file]) is None
    assert fetch(file) == (data / "plays" / "play.txt", True)
    assert fetch(file) == (data / "plays" / "play.txt", False)
    assert find(file.name, None, [file]).read_bytes() == CONTENT
    assert server.asked == ["/play.txt"]
    assert files_in(data) == ["plays/play.txt"]


@pytest.mark.parametrize("path", ["/missing", "/torn", "/play.txt"])
def test_what_comes_wrong_is_not_kept(server, data, path):
    other = b"something else" if path == "/play.txt" else CONTENT
    file = published(server, path, other)
    with pytest.raises(RunnerError) as caught:
        fetch(file)
    assert file.url in str(caught.value)
    assert file.sha256 in str(caught.value)
    if path == "/play.txt":
        assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert files_in(data) == []


def test_a_server_that_is_not_there_is_one_message(data):
    file = DataFile("play.txt", "http://127.0.0.1:9/play.txt", "0" * 64, 1, "A play")
    with pytest.raises(RunnerError, match=r"play\.txt could not be fetched from http://127\.0\.0\.1:9/.*put it into"):
        fetch(file)


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
def test_only_addresses_of_the_web_are_read(data, url):
    with pytest.raises(RunnerError, match="no address of the web"):
        fetch(DataFile("x", url, "0" * 64, 1, "x"))


PLUGIN = """\
from runner.api import DataFile
from runner.plugins.sequences.config import TextConfig

class Plays(TextConfig):
    "A play from this machine."
    kind = "plays"
    files = (DataFile("play.txt", "{url}", "{sha256}", {size}, "A play"),)
    file: str = "play.txt"
    "The play."
"""
HEAVY = "print('heavy:', *sorted({'torch', 'mlflow', 'optuna', 'numpy'} & sys.modules.keys()), file=sys.stderr)"


@pytest.fixture
def plays(server, tmp_path, data):
    """A plugin file with a source that reads a file from the server."""
    file = published(server)
    plugin = tmp_path / "plays.py"
    plugin.write_text(PLUGIN.format(url=file.url, sha256=file.sha256, size=file.size))
    return str(plugin)


@pytest.fixture
def runner(tmp_path, plays):
    """The command line in a process of its own, with that source."""

    def run(*arguments):
        code = f"import atexit, sys\natexit.register(lambda: {HEAVY})\nfrom runner.cli import main\nmain()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments, "--plugin", plays],
            cwd=tmp_path, env=os.environ | {"TERM": "dumb"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_files_are_listed_fetched_and_found_without_anything_heavy(runner, plays, data):
    listed = runner("data", "list", "--json")
    files = {each["name"]: each for each in json.loads(listed.stdout)["files"]}
    assert files["play.txt"]["sources"] == ["plays"]
    assert files["play.txt"]["path"] is None
    assert files["tinyshakespeare.txt"]["sources"] == ["text"]
    assert listed.stderr.splitlines()[-1] == "heavy:"
    absent = forked("data", "where", "play.txt", "--plugin", plays)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "runner data get play.txt" in absent.stderr
    got = forked("data", "get", "play.txt", "--plugin", plays)
    assert got.stdout == f"{data / 'play.txt'}\n", got.stderr
    where = runner("data", "where", "play.txt")
    assert (where.returncode, where.stdout) == (0, got.stdout)
    assert where.stderr.splitlines()[-1] == "heavy:"
    assert str(data / "play.txt") in forked("data", "list", "--plugin", plays).stdout


def test_a_name_that_nobody_publishes_is_refused(plays):
    for verb in ("get", "where"):
        result = forked("data", verb, "playy.txt", "--plugin", plays)
        assert result.returncode == 2
        assert "did you mean 'play.txt'?" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_downloads_when_told_to_and_never_else(plays, server, tmp_path, data):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: play\ndevice: cpu\nmodel: {kind: gpt, layers: 1, width: 8, heads: 1}\n"
        "data: {kind: plays, context: 4}\ntrain: {tokens: 64, batch_size: 4}\ntracking: {system_metrics: false}\n"
    )
    without = forked("run", str(recipe), "--quiet", "--plugin", plays)
    assert without.returncode == 2
    assert re.search(r"runner data get play\.txt, or add --download.*data\.synthetic=true", without.stderr)
    assert server.asked == []
    told = forked("run", str(recipe), "--quiet", "--plugin", plays, "--download")
    assert told.returncode == 0, told.stderr
    assert "fetched play.txt" in told.stderr
    assert server.asked == ["/play.txt"]
    assert files_in(data) == ["play.txt"]
