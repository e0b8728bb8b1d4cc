"""Plugins in files of their own: what stands beside them, what they import, and the commands that name them."""

import itertools
import random
import shutil
import signal
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from children import start
from running import forked, result_of

from runner.plugin.registry import Registry
from runner.recipe.provenance import code_digests

UNIQUE = itertools.count()
FACE = """
from runner.api import Exact, StageConfig
{imports}

class Slower(StageConfig):
    '''Slower.'''
    kind = "slower"
    phase = 1

    def contract(self, setting):
        return Exact()

    def implementation(self):
        {later}
        raise AssertionError("never assembled")
"""
GAN = Path(__file__).parents[2] / "docs" / "example_gan.py"
SHORT = [
    part
    for each in ("train.updates=12", "train.evaluate_every=12", "train.checkpoint_every=4")
    for part in ("--set", each)
]


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def plugin(folder, imports="", later="pass"):
    """A plugin file in that folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"plugin_{next(UNIQUE)}.py"
    path.write_text(FACE.format(imports=imports, later=later))
    return path


def face_of(path):
    return Registry([path], installed=()).get("optimization", "slower")


@pytest.mark.parametrize("when", ["imports", "later"])
def test_a_plugin_file_may_import_what_stands_beside_it(tmp_path, when):
    name = f"sibling_{next(UNIQUE)}"
    (tmp_path / f"{name}.py").write_text("answer = 42\n")
    face = face_of(plugin(tmp_path, **{when: f"import {name}"}))
    if when == "later":
        with pytest.raises(AssertionError, match="never assembled"):
            face().implementation()
    assert sys.modules.pop(name).answer == 42


def test_what_stands_beside_it_shadows_nothing(tmp_path):
    for name in ("random", "torch", "colorsys"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('the wrong one')")
    sys.modules.pop("colorsys", None)  # of the standard library, and imported by nobody else
    module = sys.modules[face_of(plugin(tmp_path, "import colorsys, random, torch")).__module__]
    assert module.random is random
    assert module.colorsys.rgb_to_hsv


@pytest.mark.parametrize("when", ["imports", "later"])
def test_the_code_of_a_run_has_what_a_plugin_file_imports_and_what_that_imports(tmp_path, when):
    near, far, package = (f"{name}_{next(UNIQUE)}" for name in ("near", "far", "package"))
    (tmp_path / package / "inner").mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "inner" / "deep.py").write_text("x = 1\n")
    (tmp_path / f"{near}.py").write_text(f"import {far}, json, numpy\nfrom {package}.inner import deep\n")
    (tmp_path / f"{far}.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    path = plugin(tmp_path, **{when: f"import {near}"})
    face = face_of(path)
    before = code_digests([face])
    assert before.keys() == {"runner", path.name, f"{near}.py", f"{far}.py", package}
    for changed, key in ((f"{far}.py", f"{far}.py"), (f"{package}/inner/deep.py", package)):
        (tmp_path / changed).write_text("x = 2\n")
        after = code_digests([face])
        assert {name for name in after if after[name] != before[name]} == {key}
        before = after
    (tmp_path / "unrelated.py").write_text("x = 2\n")
    assert code_digests([face]) == before


def test_what_cannot_be_found_or_read_is_passed_over(tmp_path, monkeypatch):
    odd = types.ModuleType(f"odd_{next(UNIQUE)}")
    odd.__spec__ = ModuleSpec(odd.__name__, None)
    monkeypatch.setitem(sys.modules, odd.__name__, odd)
    (tmp_path / "torn.py").write_text("def broken(:")
    path = plugin(tmp_path, later=f"import no_such_module, torn, {odd.__name__}, os.path, __main__")
    assert code_digests([face_of(path)]).keys() == {"runner", path.name, "torn.py"}


@pytest.fixture
def killed(tmp_path, monkeypatch, migrated_workspace):
    """The folder of a run with a plugin file, which was killed after its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(GAN, "my own.py")
    command = ["run", str(GAN.with_suffix(".yaml")), "--plugin", "my own.py", "--quiet", *SHORT]
    assert start(tmp_path, *command, RUNNER_FAULTS="checkpoint.state=kill@2").wait() == -signal.SIGKILL
    (folder,) = migrated_workspace.glob("runs/*")
    return folder


def test_a_run_finds_its_plugin_file_again_where_it_was_and_the_hint_is_the_whole_command(killed):
    child = forked("resume", killed.name, "--json")
    assert result_of(child)["resume"] == f"runner resume {killed.name} --plugin 'my own.py'"
    assert f"with the plugins of {Path.cwd() / 'my own.py'}, which is unchanged" in child.stderr
    again = result_of(forked("run", str(killed / "recipe.lock.yaml"), "--json", "--quiet"))
    assert again["status"] == "FINISHED"
    assert result_of(forked("evaluate", killed.name, "--json"))["same_digits"]
    assert "kind: example_gan" in forked("show", str(killed / "recipe.lock.yaml")).stdout


def test_a_plugin_file_that_has_changed_or_is_gone_is_said_with_the_command(killed, tmp_path):
    own = tmp_path / "my own.py"
    text = own.read_text()
    own.write_text(text + "# changed\n")
    name = f"{killed.name} was trained with plugins of my own.py"
    command = f"the command is: runner resume {killed.name} --plugin 'my own.py' --allow-drift"
    assert said_by("resume", killed.name) == f"{name}, and my own.py has changed since; {command}"
    own.unlink()
    gone = f"cannot be read at {own}: No such file or directory"
    assert said_by("resume", killed.name) == f"{name}, and my own.py {gone}; {command}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my own.py").write_text(text)
    told = result_of(forked("resume", killed.name, "--json", "--plugin", "elsewhere/my own.py"))
    assert told["resume"] == f"runner resume {killed.name} --plugin 'elsewhere/my own.py'"


def test_a_lock_from_elsewhere_runs_no_code_that_nobody_has_named(killed, tmp_path):
    shutil.copytree(killed, tmp_path / "got" / killed.name)
    lock = tmp_path / "got" / killed.name / "recipe.lock.yaml"
    assert said_by("run", str(lock)) == (
        f"{killed.name} was trained with plugins of my own.py; the command is: runner run {lock} --plugin 'my own.py'"
    )


def said_by(*command):
    """What a command that is refused says."""
    child = forked(*command)
    assert child.returncode == 2
    return " ".join(line for line in child.stderr.splitlines() if not line.startswith(f"runner {command[0]}: 0 s"))
