import importlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.api import StageConfig
from runner.plugin.registry import Registry
from runner.recipe.provenance import code_digests

ROOT = Path(__file__).parents[2]
UNIQUE = itertools.count()
FACE = """
from runner.api import Exact, StageConfig

class Slower(StageConfig):
    '''Slower.'''
    kind = "slower"
    phase = 1
    implementation = "Missing"

    def contract(self, setting):
        return Exact()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A plugin's package that nothing else has imported, its folder and its face."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"code_of_a_plugin_{next(UNIQUE)}"
    folder = tmp_path / name
    (folder / "works").mkdir(parents=True)
    (folder / "__init__.py").write_text(FACE)
    (folder / "works" / "deep.py").write_text("x = 1\n")
    return name, folder, importlib.import_module(name).Slower


def test_what_ships_is_one_digest():
    shipped = Registry()
    faces = [shipped.get("model", "masac"), shipped.get("data", "pettingzoo"), shipped.get("optimization", "amp")]
    digests = code_digests(faces)
    assert digests.keys() == {"runner"}
    assert len(digests["runner"]) == 64
    assert digests == code_digests([])


def test_a_plugin_adds_its_package(package):
    name, _, face = package
    digests = code_digests([face, face])
    assert digests.keys() == {"runner", name}
    assert digests["runner"] == code_digests([])["runner"]


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_an_edited_module_changes_the_digest(package, change):
    name, folder, face = package
    before = code_digests([face])
    deep = folder / "works" / "deep.py"
    if change == "edit":
        deep.write_text("x = 2\n")
    elif change == "add":
        (folder / "new.py").write_text("")
    elif change == "remove":
        deep.unlink()
    else:
        deep.rename(deep.with_name("deeper.py"))
    after = code_digests([face])
    assert after[name] != before[name]
    assert after["runner"] == before["runner"]


@pytest.mark.parametrize("file", ["README.md", "values.yaml", ".#works.py", "not-a-module.py", ".backup/old.py"])
def test_what_is_no_module_does_not_change_it(package, file):
    _, folder, face = package
    before = code_digests([face])
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("x = 2\n")
    (folder / ".#deep.py").symlink_to("nowhere")
    assert code_digests([face]) == before


def test_a_package_below_a_namespace_is_found_without_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    space = f"space_{next(UNIQUE)}"
    for name in ("own", "other"):
        (tmp_path / space / name).mkdir(parents=True)
        (tmp_path / space / name / "__init__.py").write_text("")
        (tmp_path / space / name / "faces.py").write_text(FACE)
    face = importlib.import_module(f"{space}.own.faces").Slower
    before = code_digests([face])
    (tmp_path / space / "other" / "faces.py").write_text("")
    assert code_digests([face]) == before
    assert f"{space}.own" in before


def test_a_plugin_file_is_that_file_wherever_it_lies(tmp_path):
    def digests(folder, text):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(text)
        (tmp_path / folder / "neighbour.py").write_text(f"folder = '{folder}'")
        return code_digests([Registry([path], installed=()).get("optimization", "slower")])

    first = digests("a", FACE)
    assert first.keys() == {"runner", "mine.py"}
    assert digests("b", FACE) == first
    assert digests("c", FACE + "# changed\n")["mine.py"] != first["mine.py"]


def test_a_face_without_a_file_is_named(monkeypatch):
    module = type(sys)("typed_at_a_prompt")
    monkeypatch.setitem(sys.modules, "typed_at_a_prompt", module)
    face = type("Slower", (StageConfig,), {"__module__": "typed_at_a_prompt"})
    assert "typed_at_a_prompt" in code_digests([face])


def test_installed_without_a_checkout_the_same_sources_have_the_same_digest(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    for source, target in (("runner", ""), ("plugins", "plugins"), ("recipes", "recipes")):
        shutil.copytree(ROOT / source, tmp_path / "runner" / target, ignore=ignored)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def digest():
        code = (
            "import runner, sys; from runner.recipe.provenance import code_digests; print(code_digests([])['runner']);"
            f"assert runner.__file__.startswith({str(tmp_path)!r}) and 'torch' not in sys.modules"
        )
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
        ).stdout.strip()

    installed = digest()
    assert installed == code_digests([])["runner"]
    (tmp_path / "runner" / "recipes" / "mine.yaml").write_text("")
    assert digest() == installed
    (tmp_path / "runner" / "plugins" / "marl" / "masac.py").write_text("")
    assert digest() != installed


@given(st.lists(st.binary(max_size=3), min_size=2, max_size=4))
def test_no_two_trees_share_a_digest(tmp_path_factory, contents):
    """A line moved from one file to the next is another tree."""
    from runner.recipe.provenance import _digest

    folder = tmp_path_factory.mktemp("tree")

    def digest(parts):
        for path in folder.iterdir():
            path.unlink()
        for number, part in enumerate(parts):
            (folder / f"m{number}.py").write_bytes(part)
        return _digest({path.name: path for path in folder.iterdir()})

    moved = [b"", b"".join(contents[:2]), *contents[2:]]
    assert (digest(contents) == digest(moved)) == (contents == moved)
