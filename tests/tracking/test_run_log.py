import logging
import re
import sys
import threading
from contextlib import contextmanager

import pytest
from mlflow import MlflowClient
from rich.progress import Progress
from running import train_here

from runner.system import secrets
from runner.system.console import Console
from runner.system.secrets import MASK
from runner.tracking import RunFolder, Workspace
from runner.tracking.run_log import RunLog


def kept(folder):
    lines = (folder / "run.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    return [line[20:] for line in lines]


@contextmanager
def opened(folder):
    """Not a fixture, because pytest puts a stderr of its own in place for each phase of a test."""
    with RunLog() as log:
        log.open(folder)
        yield log


def say(text):
    sys.stderr.write(f"{text}\n")


def test_what_is_written_to_stderr_is_kept_line_by_line_and_still_said(tmp_path, capsys):
    with opened(tmp_path):
        say("one two")
        sys.stderr.write("three\nfo")
        sys.stderr.write("ur\n")
        logging.lastResort.handle(logging.makeLogRecord({"msg": "it %s", "args": ("warns",), "levelno": 30}))
        assert sys.stderr.isatty() is False
    *lines, warning = kept(tmp_path)
    assert lines == ["one two", "three", "four"]
    # A command that ran in this process before marks warnings.
    assert warning.removeprefix("warning: ") == "it warns"
    assert "three\nfour\n" in capsys.readouterr().err


def test_bars_and_tables_go_past_it(tmp_path, capsys):
    console = Console(stderr=True, force_terminal=True)
    with Progress(console=console) as progress, opened(tmp_path):
        progress.update(progress.add_task("training", total=2), advance=1)
        console.print("a table")
        say("a warning")
    text = capsys.readouterr().err
    assert text.index("a table") < text.index("a warning") < text.rindex("training")
    assert kept(tmp_path) == ["a warning"]


def test_secrets_are_masked_also_where_a_line_comes_in_parts(tmp_path, monkeypatch):
    with opened(tmp_path):
        monkeypatch.setattr(secrets, "_known", frozenset())
        monkeypatch.setattr(secrets, "_pattern", None)
        secrets.register("hush-hush")
        sys.stderr.write("the key is hush")
        sys.stderr.write("-hush\n")
        assert kept(tmp_path) == [f"the key is {MASK}"]


def test_what_is_said_before_there_is_a_folder_waits_for_it_and_another_log_appends(tmp_path):
    before = sys.stderr
    with RunLog() as log:
        say("early")
        log.open(tmp_path)
        sys.stderr.write("no line end")
    with RunLog() as log:
        log.open(tmp_path)
        log.keep("resumed\nin two lines")
    assert kept(tmp_path) == ["early", "no line end", "resumed", "in two lines"]
    assert sys.stderr is before


def test_it_stays_small(tmp_path):
    with opened(tmp_path) as log:
        for _ in range(30):
            log.keep("x" * 100_000)
        text = (tmp_path / "run.log").read_text()
        assert len(text) < 1.1 * 2**20
        assert text.endswith("has reached its largest size\n")
        assert text.count("has reached its largest size") == 1


def test_a_disk_that_refuses_costs_nothing_but_the_log(tmp_path):
    with RunLog() as log:
        log.open(tmp_path / "missing")
        say("said")


def test_threads_that_train_side_by_side_do_not_leave_their_logs_behind(tmp_path):
    before, first, second = sys.stderr, RunLog(), RunLog()
    first.__enter__()
    first.open(tmp_path)
    thread = threading.Thread(target=second.__enter__)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    say("of the second")
    second.__exit__(None, None, None)
    sys.stderr = before
    assert not (tmp_path / "run.log").exists() or "of the second" not in kept(tmp_path)


@pytest.mark.usefixtures("migrated_workspace")
def test_a_run_has_one_in_its_folder_and_in_mlflow(tmp_path):
    result = train_here("marl_phase1")
    folder = RunFolder(Workspace().runs / result.run_name)
    processor, *lines = kept(folder.path)
    assert re.match(r"\d+ threads? \(", processor)
    assert lines == ["begun", "FINISHED"]
    copied = MlflowClient(result.tracking_uri).download_artifacts(result.run_id, "run.log", str(tmp_path))
    with open(copied) as file:
        assert file.read().endswith("FINISHED\n")


@pytest.mark.usefixtures("migrated_workspace")
def test_a_mistake_in_the_code_leaves_its_traceback(monkeypatch):
    def broken(_self):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("runner.training.loop.Loop.run", broken)
    monkeypatch.setattr("runner.plugin.plugin_errors.FILES", set())  # another test may have loaded one from here
    with pytest.raises(ZeroDivisionError):
        train_here("marl_phase1")
    (folder,) = Workspace().runs.iterdir()
    _, *found = kept(folder)
    assert found[:2] == ["begun", "Traceback (most recent call last):"]
    assert found[-2:] == ["ZeroDivisionError: a mistake", "FAILED: ZeroDivisionError: a mistake"]
