"""Repositories that somebody else has made: what they name is not started, and their changes are recorded."""

import hashlib
import itertools
import os
import shutil
import subprocess

import pytest

from runner.recipe import repository
from runner.recipe.provenance import checkout

KEYS = {
    "core.fsmonitor": "",
    "core.hooksPath": "",
    "core.pager": "",
    "core.sshCommand": "",
    "core.askPass": "",
    "core.editor": "",
    "core.gitProxy": "",
    "core.alternateRefsCommand": "",
    "pager.diff": "",
    "diff.external": "",
    "diff.theirs.textconv": "diff=theirs",
    "diff.theirs.command": "diff=theirs",
    "filter.theirs.clean": "filter=theirs",
    "filter.theirs.smudge": "filter=theirs",
    "filter.theirs.process": "filter=theirs",
    "filter.a=b.clean": "filter=a=b",
    "filter.lfs.clean": "filter=lfs",
    "filter.lfs.process": "filter=lfs",
}
"""Settings that name a program, each with the attribute of a file that makes git use it."""
SCOPES = ("local", "include", "includeIf", "worktree", "linked worktree", "submodule", "environment")
STARTED_BY_GIT = {"core.fsmonitor", "diff.external", "diff.theirs.textconv", "diff.theirs.command"}
STARTED_BY_GIT |= {"filter.theirs.clean", "filter.theirs.process", "filter.a=b.clean", "filter.lfs.clean"}
"""Those that a plain 'git diff' starts, which shows that the traps work."""


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    (folder / "data.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def project(template, tmp_path):
    """A copy of a repository in which one file has changed."""
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    (folder / "data.txt").write_text("two\n")
    return folder


def section(key, program):
    """The text of a configuration file that names a program."""
    head, _, name = key.rpartition(".")
    group, _, inner = head.partition(".")
    title = f'{group} "{inner}"' if inner else group
    return f'[{title}]\n\t{name} = "{program}"\n'


def configure(project, scope, text, monkeypatch):
    """Adds a text to the configuration of a scope, and returns the folder of the working tree that reads it."""
    config = project / ".git" / "config"
    included = project / ".git" / "included"
    if scope == "local":
        config.write_text(config.read_text() + text)
    elif scope in ("include", "includeIf"):
        included.write_text(text)
        condition = "include" if scope == "include" else 'includeIf "gitdir:**"'
        config.write_text(config.read_text() + f"[{condition}]\n\tpath = included\n")
    elif scope == "worktree":
        config.write_text(config.read_text() + "[extensions]\n\tworktreeConfig = true\n")
        (project / ".git" / "config.worktree").write_text(text)
    elif scope == "linked worktree":
        git(project, "worktree", "add", "-q", "../linked")
        config.write_text(config.read_text() + text)
        project = project.parent / "linked"
        (project / "data.txt").write_text("two\n")
    elif scope == "submodule":
        git(project, "submodule", "--quiet", "add", str(project), "inner")
        git(project, "commit", "-q", "-m", "second", "--", "inner", ".gitmodules")
        inner = project / ".git" / "modules" / "inner" / "config"
        inner.write_text(inner.read_text() + text)
        (project / "inner" / "data.txt").write_text("three\n")
        config.write_text(config.read_text() + text)
    else:
        name, _, value = text.partition("]\n\t")[2].partition(" = ")
        title = text[1:].partition("]")[0].replace(' "', ".").rstrip('"')
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", f"{title}.{name}")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", value.strip().strip('"'))
    return project


@pytest.mark.sampled(42)
@pytest.mark.parametrize(("scope", "key"), list(itertools.product(SCOPES, KEYS)))
def test_no_program_that_a_configuration_names_is_started(project, tmp_path, monkeypatch, scope, key):
    program, marker = tmp_path / "program", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {marker}\ncat\n")
    program.chmod(0o755)
    folder = configure(project, scope, section(key, program), monkeypatch)
    if KEYS[key]:
        (folder / ".gitattributes").write_text(f"*.txt {KEYS[key]}\n")
    found = checkout(folder)
    assert not marker.exists()
    assert len(found.commit) == 40
    assert ("in Git LFS" if "lfs" in key else "+two") in found.patch
    if key in STARTED_BY_GIT:
        subprocess.run(["git", "diff"], cwd=folder, capture_output=True, check=False)
        assert marker.exists()


def test_a_partial_clone_fetches_nothing(project, tmp_path):
    marker, program = tmp_path / "started", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    blob = git(project, "rev-parse", "HEAD:data.txt").strip()
    (project / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    config = project / ".git" / "config"
    remote = f'url = {tmp_path}\n\tuploadpack = {program}\n\tpromisor = true\n\tpartialclonefilter = "blob:none"\n'
    extensions = '[extensions]\n\tpartialClone = origin\n[remote "origin"]\n\t'
    config.write_text("[core]\n\trepositoryformatversion = 1\n" + extensions + remote)
    assert checkout(project) is None
    assert not marker.exists()


@pytest.mark.parametrize("name", ["HEAD", "index", "config", "packed-refs", "info/attributes", "commondir"])
def test_a_pipe_in_a_git_directory_blocks_nothing(project, name, monkeypatch):
    monkeypatch.setattr(repository, "_TIMEOUT_SECONDS", 5.0)
    path = project / ".git" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    checkout(project)


def test_a_changed_file_of_git_lfs_is_known_by_its_digest(project, tmp_path):
    digest = hashlib.sha256(b"large").hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize 5\n"
    (project / ".gitattributes").write_text("*.bin filter=lfs\n")
    (project / "same.bin").write_text(pointer)
    (project / "other.bin").write_text(pointer)
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "second")
    (project / "same.bin").write_text("large")
    (project / "other.bin").write_text("changed")
    (project / "data.txt").write_text("three\n")
    patch = checkout(project).patch
    assert "same.bin" not in patch
    changed = hashlib.sha256(b"changed").hexdigest()
    assert f"# other.bin: sha256 {changed} in Git LFS, committed {digest}\n" in patch
    (tmp_path / "x.patch").write_text(patch)
    git(project, "checkout", "-q", "--", "data.txt")
    git(project, "apply", str(tmp_path / "x.patch"))
    assert (project / "data.txt").read_text() == "three\n"


@pytest.mark.parametrize(
    ("setting", "content", "is_changed"),
    [
        ("core.autocrlf=input", b"one\r\n", False),
        ("core.autocrlf=false", b"one\r\n", True),
        ("core.fileMode=false", b"one\n", False),
        ("core.fileMode=true", b"one\n", True),
    ],
)
def test_files_are_compared_as_a_repository_is_configured(project, setting, content, is_changed):
    git(project, "config", *setting.split("="))
    (project / "data.txt").write_bytes(content)
    (project / "data.txt").chmod(0o755 if "fileMode" in setting else 0o644)
    assert bool(checkout(project).patch) is is_changed


def test_packed_references_and_a_split_index_are_read(project):
    expected = checkout(project)
    git(project, "pack-refs", "--all")
    git(project, "gc", "-q")
    git(project, "update-index", "--split-index")
    assert checkout(project) == expected


def test_a_repository_with_sha_256_is_read(tmp_path):
    git(tmp_path, "init", "-q", "--object-format=sha256")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    assert len(checkout(tmp_path).commit) == 64


@pytest.mark.parametrize("above", [0, 1])
def test_no_repository_is_looked_for_at_a_ceiling_or_above_it(project, monkeypatch, above):
    folder = project / "deep" / "deeper"
    folder.mkdir(parents=True)
    with repository.open_repository(folder) as found:
        assert found.top == project.resolve()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str([project, folder.parent][above]))
    with pytest.raises(repository.GitError), repository.open_repository(folder):
        pass
    with repository.open_repository(project) as found:
        assert found.top == project.resolve()
