"""Plugins in files of their own: what stands beside them, what they import, and the commands that name them."""

import itertools
import json
import random
import shutil
import signal
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from children import start
from running import forked, result_of, runner

from runner.child.spawn import Cause, ChildError
from runner.plugin.implementation import implementation_of
from runner.plugin.plugin_errors import told
from runner.plugin.registry import Registry
from runner.recipe.provenance import code_digests
from runner.system.errors import PluginError, UsageError

UNIQUE = itertools.count()
FACE = """
from runner.api import Exact, Stage, StageConfig
{imports}

class Slower(StageConfig):
    '''Slower.'''
    kind = "slower"
    phase = 1
    implementation = "{implementation}"

    def contract(self, setting):
        return Exact()


class Late(Stage):
    def attach(self, pipeline):
        {later}
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


def plugin(folder, imports="", later="pass", implementation="Late"):
    """A plugin file in that folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"plugin_{next(UNIQUE)}.py"
    path.write_text(FACE.format(imports=imports, later=later, implementation=implementation))
    return path


STAGE = "from runner.api import Stage\nclass Late(Stage):\n    def attach(self, pipeline): pass\n"


def statement(when, module):
    """Returns the part of a plugin file that imports a module."""
    return {when: f"{module}:Late" if when == "implementation" else f"import {module}"}


def face_of(path):
    return Registry([path], installed=()).get("optimization", "slower")


def attach(face):
    """Imports the stage of a plugin file and runs its method."""
    implementation_of(face)(None).attach(None)


@pytest.mark.parametrize("when", ["imports", "later", "implementation"])
def test_a_plugin_file_may_import_what_stands_beside_it(tmp_path, when):
    name = f"sibling_{next(UNIQUE)}"
    (tmp_path / f"{name}.py").write_text(f"{STAGE}answer = 42\n")
    face = face_of(plugin(tmp_path, **statement(when, name)))
    if when != "imports":
        attach(face)
    assert sys.modules.pop(name).answer == 42


def test_what_stands_beside_it_shadows_nothing(tmp_path):
    for name in ("random", "torch", "colorsys"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('the wrong one')")
    sys.modules.pop("colorsys", None)  # of the standard library, and imported by nobody else
    module = sys.modules[face_of(plugin(tmp_path, "import colorsys, random, torch")).__module__]
    assert module.random is random
    assert module.colorsys.rgb_to_hsv


@pytest.mark.parametrize("when", ["imports", "later", "implementation"])
def test_the_code_of_a_run_has_what_a_plugin_file_imports_and_what_that_imports(tmp_path, when):
    near, far, package = (f"{name}_{next(UNIQUE)}" for name in ("near", "far", "package"))
    (tmp_path / package / "inner").mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "inner" / "deep.py").write_text("x = 1\n")
    (tmp_path / f"{near}.py").write_text(f"import {far}, json, numpy\nfrom {package}.inner import deep\n")
    (tmp_path / f"{far}.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    path = plugin(tmp_path, **statement(when, near))
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
    assert f"using the plugins of {Path.cwd() / 'my own.py'}, which is unchanged" in child.stderr
    again = result_of(forked("run", str(killed / "recipe.lock.yaml"), "--json", "--quiet"))
    assert again["status"] == "FINISHED"
    assert result_of(forked("evaluate", killed.name, "--json"))["same_digits"]
    assert "kind: example_gan" in forked("show", str(killed / "recipe.lock.yaml")).stdout


def test_a_plugin_file_that_has_changed_or_is_gone_is_said_with_the_command(killed, tmp_path):
    own = tmp_path / "my own.py"
    text = own.read_text()
    own.write_text(text + "# changed\n")
    name = (
        f"{killed.name} was trained with the plugin file my own.py, which does not run unless you name it with --plugin"
    )
    command = f"the command is: runner resume {killed.name} --plugin 'my own.py' --allow-drift"
    assert said_by("resume", killed.name) == f"error: {name}, because my own.py has changed since; {command}"
    own.unlink()
    gone = f"cannot be read at {own}: No such file or directory"
    assert said_by("resume", killed.name) == f"error: {name}, because my own.py {gone}; {command}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "my own.py").write_text(text)
    told = result_of(forked("resume", killed.name, "--json", "--plugin", "elsewhere/my own.py"))
    assert told["resume"] == f"runner resume {killed.name} --plugin 'elsewhere/my own.py'"


def test_a_lock_from_elsewhere_runs_no_code_that_nobody_has_named(killed, tmp_path):
    shutil.copytree(killed, tmp_path / "got it" / killed.name)
    lock = tmp_path / "got it" / killed.name / "recipe.lock.yaml"
    reason = f"recipe.lock.yaml is not that of a run in {killed.parent}"
    for verb, argument in (("run", str(lock)), ("show", str(lock)), ("evaluate", f"got it/{killed.name}")):
        command = f"because {reason}; the command is: runner {verb} '{argument}' --plugin 'my own.py'"
        assert command in said_by(verb, argument)


def said_by(*command):
    """What a command that is refused says."""
    child = forked(*command)
    assert child.returncode == 2
    return " ".join(line for line in child.stderr.splitlines() if not line.startswith(f"runner {command[0]}: 0 s"))


HELPED = "from helper import NUMBER, package_number"
LATER = "import helper; from parts.deep import NUMBER; assert (helper.NUMBER, NUMBER) == ({0}, {0})"


def folder_with_helpers(folder, number):
    """A folder with a module and a package that import each other, of the same names in every folder."""
    (folder / "parts").mkdir(parents=True)
    (folder / "helper.py").write_text(f"from parts.deep import NUMBER as package_number\nNUMBER = {number}\n")
    (folder / "parts" / "__init__.py").write_text("import lonely_helper\n")
    (folder / "parts" / "deep.py").write_text(f"from . import lonely_helper\nNUMBER = {number}\n")
    (folder / "lonely_helper.py").write_text("")
    (folder / "random.py").write_text("raise AssertionError('the wrong one')")
    return folder


def test_every_plugin_file_imports_what_is_beside_it_also_where_names_are_equal(tmp_path):
    """At import, later, by a helper of a helper, in a package; and the digests are those of the right files."""
    before = set(sys.modules)
    faces = {}
    for number in (1, 2, 3):
        folder = folder_with_helpers(tmp_path / f"folder_{number}", number)
        faces[number] = face_of(plugin(folder, f"import random; {HELPED}", LATER.format(number)))
    for number, face in faces.items():
        module = sys.modules[face.__module__]
        assert (module.NUMBER, module.package_number, module.random) == (number, number, random)
        attach(face)
    digests = {number: code_digests([face]) for number, face in faces.items()}
    assert all("helper.py" in found for found in digests.values())
    assert len({found["helper.py"] for found in digests.values()}) == 3
    for name in set(sys.modules) - before:
        if not name.startswith("runner"):
            del sys.modules[name]


def test_equal_plugin_files_in_two_folders_have_modules_of_their_own(tmp_path):
    numbers = []
    for number in (4, 5):
        folder = folder_with_helpers(tmp_path / f"twin_{number}", number)
        (folder / "twin.py").write_text(FACE.format(imports=HELPED, later="pass", implementation="Late"))
        numbers.append(sys.modules[face_of(folder / "twin.py").__module__].NUMBER)
    assert numbers == [4, 5]
    for name in ("helper", "parts", "parts.deep", "lonely_helper"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("code", ["0", "3", "'gone'"])
def test_a_plugin_file_that_exits_is_no_verdict(tmp_path, code):
    path = plugin(tmp_path, f"import sys\nsys.exit({code})")
    with pytest.raises(UsageError, match=rf"cannot be imported: it calls sys.exit\({code}\)"):
        Registry([path])
    face = face_of(plugin(tmp_path, later=f"import sys; sys.exit({code})"))
    with pytest.raises(PluginError, match=rf"Late\.attach in .*: sys.exit\({code}\) was called"), told():
        attach(face)


LOUD = """
import atexit, ctypes, os, subprocess, sys
print("printed by a plugin")
atexit.register(print, "printed at exit")
sys.stdout.buffer.write(b"printed as bytes\\n")
os.write(1, b"printed to the descriptor\\n")
libc = ctypes.CDLL(None)
libc.puts(b"printed by C")
libc.fflush(None)
subprocess.run(["echo", "printed by a child"])
"""


def test_what_a_plugin_prints_is_not_among_the_results(tmp_path):
    path = plugin(tmp_path, LOUD)
    child = runner("plugins", "--plugin", str(path), "--json")  # a copied process runs nothing at exit
    assert child.returncode == 0
    assert json.loads(child.stdout)["schema_version"] == 1
    words = ("printed by a plugin", "at exit", "as bytes", "to the descriptor", "by C", "by a child")
    assert [word for word in words if word not in child.stderr] == []


def test_an_exit_code_of_a_plugin_looks_like_no_verdict_of_the_gate(tmp_path):
    child = forked("plugins", "slower", "--plugin", str(plugin(tmp_path, "import sys\nsys.exit(3)")), "--json")
    assert (child.returncode, child.stdout) == (2, "")
    assert "Traceback" not in child.stderr
    for code in (3, 4):
        assert ChildError(Cause.CRASHED, "", code).exit_code == 1
