"""Plugin files that a lock names run only if this user's runner wrote the lock, here, and nothing has changed."""

import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import write_lock
from runner.system import trust
from runner.system.errors import UsageError
from runner.system.trust import is_signed, signed
from runner.tracking import locked_recipe
from runner.tracking.locked_recipe import load_locked

PLUGIN = """
import os, pathlib
from runner.api import Exact, StageConfig
import helper_of_the_tests
if 'MARKER' in os.environ:  # not in a later test, whose data workers import it again
    pathlib.Path(os.environ['MARKER']).touch()

class Slower(StageConfig):
    '''Slower.'''
    kind = "slower"
    implementation = "Missing"
    phase = 1

    def contract(self, setting):
        return Exact()
"""


class Project:
    """A folder with a plugin file, what it imports, and a workspace with one run."""

    def __init__(self, folder):
        self.folder, self.run = folder, folder / ".runner" / "runs" / "example-00000000"
        self.run.mkdir(parents=True)
        self.marker = folder.parent / "executed"
        self.plugin, self.helper = folder / "mine.py", folder / "helper_of_the_tests.py"
        self.helper.write_text("x = 1\n")
        self.plugin.write_text(PLUGIN)

    @property
    def lock(self):
        return self.run / "recipe.lock.yaml"

    def write_lock(self):
        registry = Registry([self.plugin])
        write_lock(load("digits_classifier", ["optimization.slower=on"], registry), self.run, registry)
        self.forget()

    def forget(self):
        """Forgets that the plugin was imported, as a new process does."""
        self.marker.unlink(missing_ok=True)
        for name in [name for name in sys.modules if self.plugin.stem in name or self.helper.stem in name]:
            del sys.modules[name]

    def edit(self, before, after):
        text = self.lock.read_text()
        assert before in text
        self.lock.write_text(text.replace(before, after))

    def move(self, target):
        """Moves the project; its paths follow."""
        shutil.move(self.folder, target)
        for name in ("run", "plugin", "helper"):
            setattr(self, name, target / getattr(self, name).relative_to(self.folder))
        self.folder = target


@pytest.fixture(scope="module")
def lock_text(tmp_path_factory):
    """The lock of a training, without its signature."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARKER", str(folder / "executed"))
        made = Project(folder / "project")
        made.write_lock()
    return made.lock.read_text().partition("\n")[2]


@pytest.fixture
def project(tmp_path, monkeypatch, lock_text):
    made = Project(tmp_path / "project")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("MARKER", str(made.marker))
    monkeypatch.delenv("RUNNER_WORKSPACE")
    monkeypatch.chdir(made.folder)
    made.lock.write_text(signed(lock_text, made.run))
    yield made
    made.forget()


def refusal(project, *named):
    """Loads the recipe of the lock, in which nothing may run, and returns the message."""
    with pytest.raises(UsageError) as caught:
        load_locked(project.lock, "the run", [], Registry(named), lambda files: f"--plugin {next(iter(files))}")
    assert not project.marker.exists()
    return str(caught.value)


def test_the_plugin_file_of_an_own_run_is_found_again(project):
    recipe, registry, changes = load_locked(project.lock, "the run", [], Registry(), str)
    assert project.marker.exists()
    assert registry.files == (project.plugin,)
    assert "slower" in recipe.stages
    assert "code" not in {change.name.partition(".")[0] for change in changes}


def leave(project, path):
    """Keeps the path of the lock."""
    return f"- ../../../{project.plugin.name}"


def through_proc(project, path):
    return f"- /proc/self/cwd/{project.plugin.name}"


def through_root(project, path):
    return f"- /proc/self/root{path}"


def through_descriptor(project, path):
    project.descriptor = os.open(project.folder, os.O_RDONLY)
    return f"- /proc/self/fd/{project.descriptor}/{project.plugin.name}"


def through_link(project, path):
    link = project.folder / "link.py"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    return f"- {link}"


def through_linked_folder(project, path):
    link = project.folder / "linked"
    link.unlink(missing_ok=True)
    link.symlink_to(project.folder)
    return f"- ../../../linked/{project.plugin.name}"


def current_folder(project, path):
    return f"- /nowhere/{project.plugin.name}"


def absolute(project, path):
    return f"- {path}"


def dotted(project, path):
    return f"- ../../.././x/../{project.plugin.name}"


PATHS = (
    leave, through_proc, through_root, through_descriptor, through_link, through_linked_folder, current_folder,
    absolute, dotted,
)  # fmt: skip


def unsigned(project, monkeypatch):
    project.lock.write_text(project.lock.read_text().partition("\n")[2])


def another_key(project, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(project.folder.parent / "other"))
        body = project.lock.read_text().partition("\n")[2]
        project.lock.write_text(signed(body, project.run))


def no_key(project, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(project.folder.parent / "none"))


def moved(project, monkeypatch):
    target = project.folder.parent / "moved"
    project.move(target)
    monkeypatch.chdir(target)


def copied_run(project, monkeypatch):
    copy = project.run.with_name("other-00000001")
    shutil.copytree(project.run, copy)
    project.run = copy


def owned_by_another(project, monkeypatch):
    monkeypatch.setattr(trust.os, "geteuid", lambda: 12345)


def linked_run(project, monkeypatch):
    elsewhere = project.folder / "elsewhere"
    shutil.move(project.run, elsewhere)
    project.run.symlink_to(elsewhere)


ORIGINS = (unsigned, another_key, no_key, moved, copied_run, owned_by_another, linked_run)


@pytest.mark.parametrize(("origin", "path"), list(itertools.product(ORIGINS, PATHS)))
def test_no_plugin_file_of_a_foreign_lock_runs(project, monkeypatch, origin, path):
    listed = f"- ../../../{project.plugin.name}"
    changed = path(project, project.plugin)
    if changed != listed:
        project.edit(listed, changed)
    origin(project, monkeypatch)
    message = refusal(project)
    assert "--plugin" in message
    assert project.plugin.name in message or "link.py" in message


@pytest.mark.parametrize("path", PATHS[1:])
def test_a_lock_whose_paths_were_changed_is_not_trusted(project, path):
    project.edit(f"- ../../../{project.plugin.name}", path(project, project.plugin))
    assert "--plugin" in refusal(project)


@pytest.mark.parametrize("name", ["plugin", "helper"])
@pytest.mark.parametrize("content", ["x = 2\n", "", None, "pipe", "folder"])
def test_a_source_that_has_changed_does_not_run(project, name, content):
    path = getattr(project, name)
    path.unlink()
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    assert path.name in refusal(project)


def test_a_plugin_file_that_is_named_runs_also_with_a_foreign_lock(project):
    unsigned(project, None)
    load_locked(project.lock, "the run", [], Registry([project.plugin]), str)
    assert project.marker.exists()


@pytest.mark.parametrize("name", ["plugin", "helper"])
def test_a_change_of_a_file_that_is_named_is_returned(project, name):
    path = getattr(project, name)
    path.write_text(f"{path.read_text()}\ny = 2\n")
    _, _, changes = load_locked(project.lock, "the run", [], Registry([project.plugin]), str)
    assert f"code.{path.name}" in {change.name for change in changes if change.matters}


def test_a_lock_of_another_workspace_is_foreign(project, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_WORKSPACE", str(tmp_path / "other"))
    assert "is not that of a run in" in refusal(project)


def test_a_workspace_behind_a_link_is_the_same(project, tmp_path, monkeypatch):
    (tmp_path / "alias").symlink_to(project.folder)
    monkeypatch.chdir(tmp_path / "alias")
    load_locked(Path(".runner/runs") / project.run.name / "recipe.lock.yaml", "the run", [], Registry(), str)
    assert project.marker.exists()


def test_a_signature_is_bound_to_the_folder_of_the_run(project):
    assert is_signed(project.lock.read_text(), project.run)
    assert not is_signed(project.lock.read_text(), project.folder)
    assert locked_recipe._distrust(project.lock) == ""
