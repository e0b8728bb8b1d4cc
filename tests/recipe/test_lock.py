import hashlib
import shutil
import subprocess

import pytest
from faces import RECIPE, FakeCatalog, write_recipe

from runner.recipe import drift, load, write_lock
from runner.recipe.git import checkout
from runner.recipe.source import read


@pytest.fixture
def recipe(tmp_path):
    return load(write_recipe(tmp_path), ("seed=8", "model.password=hunter2"), FakeCatalog())


@pytest.fixture
def lock(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    return write_lock(recipe, tmp_path / "run", FakeCatalog())


def test_a_lock_runs_the_same_recipe_again(recipe, lock):
    again = load(lock, (), FakeCatalog())
    assert again.values() == recipe.values()
    assert again.digest == recipe.digest
    assert str(again.origins["seed"]).endswith("recipe.lock.yaml:5:9")


def test_a_lock_says_what_the_run_was_made_from(recipe, lock):
    content = read(lock, []).plain()
    assert content["lock"] == 1
    assert content["digest"] == recipe.digest
    assert content["origins"]["seed"] == "--set #1 seed=8"
    assert content["origins"]["model.order"] == "default"
    assert content["plugins"]["optimization.cache"] == "proven-runner 0.1.0"
    assert {"torch", "numpy", "mlflow", "pydantic", "proven-runner"} <= content["packages"].keys()
    assert content["hardware"]["cores"] >= 1
    assert "OMP_NUM_THREADS" in content["threads"]


def test_no_secret_is_written(lock, monkeypatch, recipe, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter3")
    text = write_lock(recipe, tmp_path / "run", FakeCatalog()).read_text()
    assert "hunter3" not in text
    assert "password: '**********'" in text


def test_nothing_has_drifted_at_once(lock):
    again = load(lock, (), FakeCatalog())
    assert drift(lock, again, FakeCatalog()) == []


def test_what_drifted_is_said_line_by_line(lock):
    text = lock.read_text()
    for old, new in (
        ("  seed: 8\n", "  seed: 9\n"),
        ("  numpy: ", "  vanished: '1.0'\n  numpy: 0."),
        ("cores: ", "cores: 9"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    lock.write_text(text)
    again = load(lock, ("seed=8",), FakeCatalog())
    lines = drift(lock, again, FakeCatalog())
    assert "recipe.seed: 9 in the lock, 8 now" in lines
    assert "packages.vanished: 1.0 in the lock, absent now" in lines
    assert any(line.startswith("packages.numpy: 0.") for line in lines)
    assert any(line.startswith("hardware.cores: 9") for line in lines)


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
    monkeypatch.setattr("runner.recipe.git.runner.__file__", str(repository / "nowhere" / "__init__.py"))
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


@needs_git
def test_a_folder_outside_of_any_repository_has_no_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout(tmp_path) is None
    assert checkout(tmp_path / "missing") is None
