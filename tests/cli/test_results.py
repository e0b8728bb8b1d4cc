"""Results that cannot be written are an error in one line; messages that cannot be written are lost."""

import errno
import io
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from runner.cli.results import Results
from runner.system.errors import OutputError
from runner.system.terminal import CleanStream

COMMANDS = ("--version", "--help", "recipes", "ls --json")


def run(command, redirection):
    words = f'exec "{sys.executable}" -m runner {command} {redirection}'
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_results_that_cannot_be_written_are_one_line(command):
    child = run(command, ">/dev/full")
    assert child.stderr == "error: the output cannot be written: No space left on device\n"
    assert child.returncode == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stdout_receives_nothing(command):
    child = run(command, ">&-")
    assert (child.returncode, child.stderr) == (0, "")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_results_are_printed_without_messages(redirection):
    child = run("recipes", redirection)
    assert child.returncode == 0
    assert "digits_classifier" in child.stdout
    assert run("validate nothing", redirection).returncode == 2


def test_without_any_stream_the_exit_code_remains():
    assert run("--version", "<&- >&- 2>&-").returncode == 0
    assert run("validate nothing", "<&- >&- 2>&-").returncode == 2
    assert run("--version", ">/dev/full 2>&1").returncode == 1


class Disk(io.RawIOBase):
    """A file on a disk that is full."""

    is_full = True

    def writable(self):
        return True

    def write(self, data):
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


@pytest.fixture
def full():
    """A stream to a full disk."""
    disk = Disk()
    yield io.TextIOWrapper(io.BufferedWriter(disk))
    # What is buffered is written when the stream is collected.
    disk.is_full = False


@pytest.mark.parametrize("text", ["short", "long" * 100_000])
@pytest.mark.parametrize("is_optional", [True, False])
def test_only_optional_text_is_lost(text, is_optional, full):
    stream = CleanStream(full, is_optional)
    with nullcontext() if is_optional else pytest.raises(OutputError, match="No space left on device"):
        print(text, file=stream, flush=True)


def test_a_command_that_fails_to_print_gives_stdout_back(full, monkeypatch):
    stdout = CleanStream(full)
    monkeypatch.setattr(sys, "stdout", stdout)
    results = Results()
    with pytest.raises(OutputError), results.reserved():
        results.stream.write("text")
    assert results.stream is sys.stdout is stdout
