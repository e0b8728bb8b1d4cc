"""What git is asked about a folder that somebody else has made."""

import subprocess

import pytest

from runner.recipe.provenance import checkout


@pytest.fixture
def repository(tmp_path):
    """A repository whose settings name programs, and a changed file; each program leaves a file behind."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)

    folder = tmp_path / "theirs"
    folder.mkdir()
    git("init", "-q")
    (folder / "data.txt").write_text("one\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (folder / "data.txt").write_text("two\n")
    return folder, git


@pytest.mark.parametrize(
    ("setting", "attribute"),
    [
        ("core.fsmonitor", ""),
        ("diff.external", ""),
        ("diff.theirs.textconv", "diff=theirs"),
        ("diff.theirs.command", "diff=theirs"),
        ("filter.theirs.clean", "filter=theirs"),
        ("filter.theirs.process", "filter=theirs"),
    ],
)
def test_no_program_that_a_repository_names_is_started(repository, tmp_path, setting, attribute):
    folder, git = repository
    program, marker = tmp_path / "program", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    program.chmod(0o755)
    git("config", setting, str(program))
    if attribute:
        (folder / ".gitattributes").write_text(f"*.txt {attribute}\n")
    found = checkout(folder)
    assert not marker.exists()
    assert "+two" in found.patch
