import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from typing import ClassVar

import pytest
from faces import RECIPE, FakeCatalog, write_recipe

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import Drift, drift, read_lock, write_lock
from runner.recipe.provenance import Checkout, checkout
from runner.recipe.yaml_nodes import RecipeError, read
from runner.system.manifest import NAME
from runner.system.secrets import MASK

PASSWORD = "model.password=hunter2"
"""Not kept in a lock, and so to be given again."""


@pytest.fixture
def recipe(tmp_path):
    return load(write_recipe(tmp_path), ("seed=8", PASSWORD), FakeCatalog())


@pytest.fixture
def lock(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    return write_lock(recipe, tmp_path / "run", FakeCatalog())


def test_a_lock_runs_the_same_recipe_again(recipe, lock):
    again = load(lock, (PASSWORD,), FakeCatalog())
    assert again.values() == recipe.values()
    assert again.digest == recipe.digest
    assert str(again.origins["seed"]).endswith("recipe.lock.yaml:6:9")


def test_a_lock_says_what_the_run_was_made_from(recipe, lock):
    content = read(lock, []).plain()
    assert content["lock"] == 1
    assert content["digest"] == recipe.digest
    assert content["origins"]["seed"] == "override seed=8"
    assert content["origins"]["model.order"] == "default"
    assert content["plugins"]["optimization.cache"] == "proven-runner 0.1.0"
    assert {"torch", "numpy"} <= content["packages"].keys()
    assert {"runner", "mlflow", "pydantic", "proven-runner"} <= content["tools"].keys()
    assert content["code"].keys() == {"runner", "faces.py"}
    assert content["hardware"]["cores"] >= 1
    assert "OMP_NUM_THREADS" in content["threads"]


def test_no_secret_is_written(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    text = write_lock(recipe, tmp_path / "run", FakeCatalog()).read_text()
    assert "hunter" not in text
    assert "password: '**********'" in text


def test_nothing_has_drifted_at_once(lock):
    again = load(lock, (PASSWORD,), FakeCatalog())
    assert drift(lock, again, FakeCatalog()) == []


def changed(lock, *replacements):
    """Puts something else into the lock: what was true when it was written is no longer."""
    (lock.parent / NAME).unlink(missing_ok=True)
    text = lock.read_text()
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    lock.write_text(text)


def test_what_drifted_is_said_line_by_line_and_what_matters_first(lock):
    changed(
        lock,
        ("  seed: 8\n", "  seed: 9\n"),
        ("  numpy: ", "  vanished: '1.0'\n  numpy: 0."),
        ("  mlflow: ", "  mlflow: 0."),
        ("cores: ", "cores: 9"),
    )
    changes = drift(lock, load(lock, ("seed=8", PASSWORD), FakeCatalog()), FakeCatalog())
    assert [(change.name, change.matters) for change in changes] == [
        ("recipe.seed", True),
        ("packages.numpy", True),
        ("packages.vanished", True),
        ("tools.mlflow", False),
        ("hardware.cores", False),
    ]
    assert str(changes[0]) == "recipe.seed: 9 in the lock, 8 now"
    assert changes[2] == Drift("packages.vanished", "1.0", "absent", True)


@pytest.mark.parametrize(
    ("old", "new", "name", "matters"),
    [
        ("  torch: ", "  torch: 0.", "packages.torch", True),
        ("  optimization.cache: proven-runner 0", "  optimization.cache: other 9", "plugins.optimization.cache", True),
        ("  model.net: proven-runner 0.1.0\n", "", "plugins.model.net", True),
        ("    lr: 0.001", "    lr: 0.002", "recipe.model.lr", True),
        ("code:\n", "code:\n  gone: abc\n", "code.gone", True),
        ("  rich: ", "  rich: 0.", "tools.rich", False),
        ("  runner: 0", "  runner: 9", "tools.runner", False),
        ("  OMP_NUM_THREADS: ", "  OMP_NUM_THREADS: 9 #", "threads.OMP_NUM_THREADS", False),
        ("  python: ", "  python: 2.", "hardware.python", False),
    ],
)
def test_what_matters(recipe, lock, old, new, name, matters):
    changed(lock, (old, new))
    changes = drift(lock, recipe, FakeCatalog())
    assert [(change.name, change.matters) for change in changes] == [(name, matters)]


def test_another_commit_does_not_matter_as_such(recipe, lock, monkeypatch):
    monkeypatch.setattr("runner.recipe.lock.source", lambda path: Checkout("f" * 40, "+text\n"))
    changes = drift(lock, recipe, FakeCatalog())
    assert "source.commit" in {change.name for change in changes}
    assert not any(change.matters for change in changes)


FACE = """
from runner.api import Exact, StageConfig

class Mine(StageConfig):
    kind = "mine"
    implementation = "Missing"
    phase = 1

    def contract(self, setting):
        return Exact()
"""


def test_an_edited_plugin_file_matters_wherever_it_lies(tmp_path, monkeypatch):
    def registry(folder, text):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
        return Registry([tmp_path / folder / "mine.py"])

    def loaded(registry):
        return load("marl_baseline", ("optimization={mine: on}",), registry)

    first, moved = registry("a", FACE), registry("b", FACE)
    lock = write_lock(loaded(first), tmp_path, first)
    monkeypatch.chdir(tmp_path / "b")
    assert drift(lock, loaded(moved), moved) == []
    edited = registry("c", FACE.replace("phase = 1", "phase = 2"))
    changes = drift(lock, loaded(edited), edited)
    assert [change.name for change in changes] == ["code.mine.py", "plugins.optimization.mine"]
    assert all(change.matters for change in changes)


def test_an_edited_module_of_a_plugins_package_matters_and_its_page_does_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "lock_auth"
    package.mkdir()
    (package / "__init__.py").write_text(FACE)
    (package / "works.py").write_text("x = 1\n")
    face = importlib.import_module("lock_auth").Mine

    class Catalog(FakeCatalog):
        faces: ClassVar = FakeCatalog.faces | {"optimization": (*FakeCatalog.faces["optimization"], face)}

    recipe = load(write_recipe(tmp_path), ("optimization.mine=on",), Catalog())
    lock = write_lock(recipe, tmp_path, Catalog())
    (package / "README.md").write_text("changed")
    assert drift(lock, recipe, Catalog()) == []
    (package / "works.py").write_text("x = 2\n")
    assert [(change.name, change.matters) for change in drift(lock, recipe, Catalog())] == [("code.lock_auth", True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "is empty"),
        ("lock: 1\nrecipe: {seed: 1", "invalid YAML"),
        ("lock: 1\nrecipe: {seed: 1, seed: 2}\n", "duplicate key"),
        ("\0\0\0\0", "not allowed"),
        ("- 1\n", "is a mapping"),
        ("lock: 1\n", "recipe: is missing"),
        ("lock: 1\nrecipe: 3\n", "recipe: should be a mapping"),
        ("lock: 1\nrecipe: {}\npackages: [torch]\n", "packages: should be a mapping"),
        ("recipe: {}\n", "lock: is missing"),
        ("lock: soon\nrecipe: {}\n", "lock: should be an integer"),
    ],
)
def test_a_damaged_lock_says_what_is_wrong_and_what_to_do(recipe, tmp_path, text, message):
    path = tmp_path / "recipe.lock.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        drift(path, recipe, FakeCatalog())
    assert message in str(caught.value)
    assert "restore it from the run's artifacts in MLflow, or start a new run" in str(caught.value)
    assert caught.value.exit_code == 7


def test_a_lock_cut_anywhere_is_refused_or_drifted(recipe, lock):
    text = lock.read_text()
    (lock.parent / NAME).unlink()
    for length in range(0, len(text) - 1, 211):
        lock.write_text(text[:length])
        try:
            assert any(change.matters for change in drift(lock, recipe, FakeCatalog()))
        except RecipeError as error:
            assert "restore it" in str(error)  # noqa: PT017 (either will do)


def test_a_lock_from_the_future_asks_for_a_newer_runner(lock):
    changed(lock, ("lock: 1\n", "lock: 2\n"))
    with pytest.raises(RecipeError, match=r"lock: format 2 is newer than this runner reads .*: update it"):
        read_lock(lock)


def test_what_is_redacted_in_a_lock_is_neither_shown_nor_a_drift(tmp_path):
    text = RECIPE.replace("name: example", "name: example\nserve: {host: 'https://me:hunter22@host/x'}")
    recipe = load(write_recipe(tmp_path, text), (), FakeCatalog())
    lock = write_lock(recipe, tmp_path, FakeCatalog())
    assert "hunter22" not in lock.read_text()
    assert drift(lock, recipe, FakeCatalog()) == []
    changed(lock, ("https://me", "https://you"))
    (change,) = drift(lock, recipe, FakeCatalog())
    assert change.name == "recipe.serve.host"
    assert "hunter22" not in str(change)


def test_a_lock_is_whole_or_as_it_was(recipe, lock, tmp_path, monkeypatch):
    before = lock.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_lock(recipe, tmp_path / "run", FakeCatalog())
    assert lock.read_text() == before
    assert [path.name for path in lock.parent.glob("*lock*")] == [lock.name]


def test_torch_is_not_imported_for_it(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from runner.recipe.loader import load; from runner.recipe.lock import drift, write_lock\n"
        "from runner.plugin.registry import Registry\n"
        "registry = Registry(); recipe = load('marl_phase2', (), registry)\n"
        "assert drift(write_lock(recipe, Path(sys.argv[1]), registry), recipe, registry) == []\n"
        "assert not {'torch', 'mlflow', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("recipe.yaml", "secrets.yaml", ".env"):
        write_recipe(tmp_path, RECIPE, name)
    git("add", "-f", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


@needs_git
def test_a_clean_checkout_is_its_commit(repository):
    found = checkout(repository)
    assert len(found.commit) == 40
    assert (found.patch, found.patch_sha256) == ("", None)


@needs_git
def test_changes_are_a_patch_without_files_that_hold_secrets(repository):
    for name in ("recipe.yaml", "secrets.yaml", ".env"):
        write_recipe(repository, f"changed: {name}\n", name)
    found = checkout(repository)
    assert "+changed: recipe.yaml" in found.patch
    assert "changed: secrets.yaml" not in found.patch
    assert "changed: .env" not in found.patch
    assert found.patch_sha256 == hashlib.sha256(found.patch.encode()).hexdigest()


@needs_git
def test_the_patch_is_written_beside_the_lock(repository, monkeypatch):
    monkeypatch.setattr("runner.recipe.provenance.runner.__file__", str(repository / "nowhere" / "__init__.py"))
    (repository / "run").mkdir()
    path = write_recipe(repository, RECIPE + "# changed\n")
    recipe = load(path, (), FakeCatalog())
    lock = write_lock(recipe, repository / "run", FakeCatalog())
    patch = (repository / "run" / "source.patch").read_bytes()
    assert b"+# changed" in patch
    assert read(lock, []).plain()["source"]["patch_sha256"] == hashlib.sha256(patch).hexdigest()
    subprocess.run(["git", "checkout", "-q", "--", "recipe.yaml"], cwd=repository, check=True)
    subprocess.run(["git", "apply", "run/source.patch"], cwd=repository, check=True)
    assert path.read_text().endswith("# changed\n")
    write_recipe(repository, RECIPE)
    write_lock(load(path, (), FakeCatalog()), repository / "run", FakeCatalog())
    assert not (repository / "run" / "source.patch").exists()


@needs_git
def test_results_are_no_change_of_the_source(repository):
    results = repository / "results [*]"
    results.mkdir()
    (results / "rounds.jsonl").write_text("{}\n")
    subprocess.run(["git", "add", "-N", "."], cwd=repository, check=True)
    assert "rounds.jsonl" in checkout(repository).patch
    assert checkout(repository, results).patch == ""
    write_recipe(repository, "changed: true\n")
    assert "rounds.jsonl" not in checkout(repository, results).patch
    assert "+changed: true" in checkout(repository, results).patch
    assert checkout(repository, repository.parent / "elsewhere") == checkout(repository)


@needs_git
def test_a_patch_keeps_names_and_no_secret(repository, monkeypatch):
    monkeypatch.setattr("runner.recipe.provenance.runner.__file__", str(repository / "nowhere" / "__init__.py"))
    path = write_recipe(repository, RECIPE + "# it was swordfish\n")
    (repository / "a.py").write_text("password = words[i]\nadmin = 'swordfish'\ndb = 'redis://me:hunter3@host'\n")
    subprocess.run(["git", "add", "-N", "a.py"], cwd=repository, check=True)
    write_lock(load(path, ("model.password=swordfish",), FakeCatalog()), repository, FakeCatalog())
    patch = (repository / "source.patch").read_text()
    assert f"+password = words[i]\n+admin = '{MASK}'\n+db = 'redis://me:{MASK}@host'\n" in patch
    assert f"+# it was {MASK}\n" in patch
    assert not re.search("swordfish|hunter3", patch)


@needs_git
def test_a_folder_outside_of_any_repository_has_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout(tmp_path) is None
    assert checkout(tmp_path / "missing") is None
