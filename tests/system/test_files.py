import errno
import itertools
import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

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


def write_record(path):
    write_durably(path, "text")


def write_plain(path):
    files.write_text(path, "text")


def append_line(path):
    with open(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(b"line\n")


def truncate(path):
    os.close(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def make(path):
    files.make_folder(path / "inner")


def read(path):
    assert files.read_regular(path) != SECRET


def rename_away(path):
    files.rename(path, path.with_name("renamed"))


def rename_over(path):
    (path.parents[2] / "new").write_text("new")
    files.rename(path.parents[2] / "new", path)


def link_elsewhere(path):
    files.link(path, path.parents[1] / "second")


SECRET = b"private\n"
CALLS = (write_record, write_plain, append_line, truncate, make, read, files.remove, files.remove_quietly,
         rename_away, rename_over, link_elsewhere, files.sync)  # fmt: skip


def to_file(path, outside):
    path.symlink_to(outside / "notes.txt")


def to_folder(path, outside):
    path.symlink_to(outside)


def to_nothing(path, outside):
    path.symlink_to(outside / "missing")


def linked_parent(path, outside):
    path.parent.rmdir()
    path.parent.symlink_to(outside)


def linked_grandparent(path, outside):
    shutil.rmtree(path.parents[1])
    path.parents[1].symlink_to(outside)


def hard_link(path, outside):
    path.hardlink_to(outside / "notes.txt")


def pipe(path, outside):
    os.mkfifo(path)


TRAPS = (to_file, to_folder, to_nothing, linked_parent, linked_grandparent, hard_link, pipe)


def tree(folder):
    return {path: (path.lstat().st_mode, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}


@pytest.mark.parametrize(("call", "trap"), list(itertools.product(CALLS, TRAPS)))
def test_nothing_behind_a_link_is_written_read_or_deleted(tmp_path, call, trap):
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "item").mkdir(parents=True)
    (outside / "notes.txt").write_bytes(SECRET)
    (outside / "item" / "file").write_bytes(SECRET)
    path = root / "runs" / "run" / "item"
    path.parent.mkdir(parents=True)
    files.guard(root)
    trap(path, outside)
    before = tree(outside)
    if trap is hard_link and call in (read, link_elsewhere, rename_over):
        return  # the content is in the workspace, too
    with suppress(OSError):
        call(path)
    assert tree(outside) == before


@pytest.mark.parametrize("name", ["..", "a/../../outside", "../outside"])
def test_a_path_that_leaves_a_guarded_folder_is_taken_as_what_it_means(tmp_path, name):
    root = tmp_path / "root"
    root.mkdir()
    files.guard(root)
    files.make_folder(root / "inner" / ".." / "made")
    assert (root / "made").is_dir()
    assert not (root / "inner").exists()
    assert files._root_of(Path(os.path.abspath(root / name))) is None


def test_a_large_file_is_not_read(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 100)
    assert files.read_regular(path, 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        files.read_regular(path, 99)


def test_the_message_names_the_link(tmp_path):
    files.guard(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link is a symbolic link, which is not followed"):
        write_durably(tmp_path / "link" / "file", "text")
