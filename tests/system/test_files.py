import errno
import os
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system import files
from runner.system.files import sync, write_durably

BYTES = st.binary(max_size=200).map(lambda data: data.decode("utf-8", "surrogateescape"))


@given(BYTES)
def test_what_is_written_is_read(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("files") / "file.txt"
    write_durably(path, "before")
    write_durably(path, text)
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape")
    assert os.listdir(path.parent) == ["file.txt"]


def test_others_may_read_as_far_as_the_umask_lets_them(tmp_path):
    path = tmp_path / "file.txt"
    mask = os.umask(0o022)
    try:
        write_durably(path, "text")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_after_a_failure_the_file_is_as_it_was(tmp_path, monkeypatch, fails):
    path = tmp_path / "file.txt"
    write_durably(path, "before")

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "after")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_content_is_durable_before_its_name_is_and_then_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    kinds = {True: "folder", False: "file"}
    monkeypatch.setattr(
        files.os, "fsync", lambda fd: (calls.append(kinds[stat.S_ISDIR(os.fstat(fd).st_mode)]), fsync(fd))
    )
    monkeypatch.setattr(files.os, "replace", lambda *paths, **fds: (calls.append("rename"), replace(*paths, **fds)))
    write_durably(tmp_path / "file.txt", "text")
    assert calls == ["file", "rename", "folder"]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (tmp_path / f".file.txt.{os.getpid()}.partial").symlink_to(other)
    write_durably(tmp_path / "file.txt", "text")
    assert other.read_text() == "mine"
    assert not (tmp_path / "file.txt").is_symlink()


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "file.txt"
    write_durably(path, "0" * 100_000)
    code = (
        "import sys, itertools; from pathlib import Path; from runner.system.files import write_durably\n"
        "for i in itertools.count(): write_durably(Path(sys.argv[1]), str(i % 10) * 100_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        seen = set()
        deadline = time.monotonic() + 60
        while len(seen) < 5 and time.monotonic() < deadline:
            text = path.read_text()
            assert len(text) == 100_000
            assert len(set(text)) == 1
            seen.add(text[0])
    finally:
        writer.kill()  # SIGKILL, wherever it is
        writer.wait()
    assert len(seen) >= 5
    assert len(set(path.read_text())) == 1


def test_what_is_not_there_cannot_be_made_durable(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "missing")
