"""What this user's runner has written is recognized, and nothing else."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runner.system import trust
from runner.system.trust import is_own, is_signed, key_path, signed

HERE = Path("/projects/mine/.runner/runs/example-1")
TEXT = "lock: 1\nrecipe:\n  name: example\nplugin_files: [../x.py]\ncode: {runner: '123'}\n"


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@given(st.text(max_size=200))
@settings(max_examples=50)
def test_a_signed_text_is_recognized_and_follows_its_signature(text):
    text = text.encode(errors="ignore").decode()
    assert is_signed(signed(text, HERE), HERE)
    assert signed(text, HERE).partition("\n")[2] == text


@given(st.data())
@settings(max_examples=100)
def test_a_text_that_was_changed_in_any_character_is_not(data):
    original = signed(TEXT, HERE)
    place = data.draw(st.integers(0, len(original) - 1))
    inserted = data.draw(st.text(max_size=3))
    removed = data.draw(st.integers(0, 3))
    changed = original[:place] + inserted + original[place + removed :]
    assume(changed != original)
    assert not is_signed(changed, HERE)


@pytest.mark.parametrize("folder", ["/projects/other/.runner/runs/example-1", "/projects", "/"])
def test_a_text_that_was_moved_is_not(folder):
    assert not is_signed(signed(TEXT, HERE), Path(folder))


@pytest.mark.parametrize("text", ["", "# signed: \n", TEXT, f"# signed: {'0' * 64}\n{TEXT}", "# signed: é\n"])
def test_a_text_without_a_signature_is_not(text):
    assert not is_signed(text, HERE)


def test_a_key_is_secret_and_stays(state):
    first = signed(TEXT, HERE)
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert key_path().is_relative_to(state)
    assert signed(TEXT, HERE) == first
    assert [path.name for path in key_path().parent.iterdir()] == ["key"]


def test_another_key_recognizes_nothing(state):
    text = signed(TEXT, HERE)
    state.rename(state.with_name("other"))
    assert not is_signed(text, HERE)
    assert signed(TEXT, HERE) != text
    assert not is_signed(text, HERE)


def spoil_length():
    key_path().write_bytes(b"short")


def spoil_mode():
    key_path().chmod(0o644)


def spoil_with_link():
    target = key_path().with_name("target")
    key_path().rename(target)
    key_path().symlink_to(target)


def spoil_with_pipe():
    key_path().unlink()
    os.mkfifo(key_path(), 0o600)


def spoil_with_folder():
    key_path().unlink()
    key_path().mkdir()


@pytest.mark.parametrize("spoil", [spoil_length, spoil_mode, spoil_with_link, spoil_with_pipe, spoil_with_folder])
@pytest.mark.usefixtures("state")
def test_a_key_that_others_may_have_made_is_not_used(spoil, caplog):
    text = signed(TEXT, HERE)
    spoil()
    assert not is_signed(text, HERE)
    assert signed(TEXT, HERE) == TEXT
    assert "plugin files have to be named with --plugin again" in caplog.text


def test_a_state_folder_that_cannot_be_written_costs_the_signature_only(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert signed(TEXT, HERE) == TEXT
    assert not is_signed(TEXT, HERE)
    assert "plugin files have to be named" in caplog.text


@pytest.mark.usefixtures("state")
def test_processes_that_begin_together_have_one_key():
    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda _: signed(TEXT, HERE), range(32)))
    assert len(texts) == 1


def test_files_of_others_and_links_are_not_own(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "link").symlink_to(file)
    assert is_own(file)
    assert not is_own(tmp_path / "link")
    assert not is_own(tmp_path / "missing")
    monkeypatch.setattr(trust.os, "geteuid", lambda: file.stat().st_uid + 1)
    assert not is_own(file)
