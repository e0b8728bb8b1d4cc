"""Whatever a name in a recipe says, nothing is written outside of the folder that the name belongs to."""

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

import pytest
import run_folders
from faces import RECIPE, FakeCatalog, write_recipe
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.recipe.dumping import dump
from runner.recipe.loader import find, layers, load
from runner.recipe.lock import copy_recipe
from runner.recipe.yaml_nodes import RecipeError
from runner.system.errors import UsageError
from runner.tracking import Workspace
from runner.tracking.keys import mlflow_key
from runner.tracking.store import Store
from runner.tracking.tracker import Tracker
from runner.tracking.workspace import RunFolder, folder_name

HOSTILE = [
    "../../x", "..", ".", "/etc/x", "~/x", "a/../../x", "a\\..\\x", "a\0b", "x\ny", " ", "-rf", "$(touch x)",
    "%2e%2e/x", "file:///etc", "http://host/x", "\u2025/x", "é" * 200, "a" * 200, "..." * 50, "con", "x\u202ey",
]  # fmt: skip
parts = st.sampled_from(["..", ".", "/", "\\", "~", "\0", "\n", "a", "é", " ", ":", "%2e", "etc", "\u2025"])
names = st.one_of(st.sampled_from(HOSTILE), st.lists(parts, max_size=12).map("".join), st.text(max_size=60))
per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, by path."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@given(names)
def test_a_folder_name_is_the_name_of_one_folder(name):
    inside = Path("/runs") / folder_name(name)
    assert inside.parent == Path("/runs")
    assert os.path.normpath(inside) == str(inside)
    assert "\0" not in str(inside)


@given(names)
def test_a_key_leads_nowhere_else(name):
    path = PurePosixPath(mlflow_key(name))
    assert not path.is_absolute()
    assert ".." not in path.parts


@per_example
@given(names)
@example("x\n")
def test_the_name_of_a_recipe_is_the_name_of_one_folder_or_refused(tmp_path, name):
    path = write_recipe(tmp_path, RECIPE.replace("name: example", dump({"name": name}).rstrip("\n")))
    is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None
    with nullcontext() if is_plain else pytest.raises(RecipeError, match=r"recipe\.yaml:1:\d+: name: "):
        assert load(path, (), FakeCatalog()).name == name == Path(name).name


@per_example
@given(names)
def test_a_run_has_a_folder_among_the_runs(tmp_path, name):
    folder = RunFolder.create(tmp_path / "runs", name)
    folder.release()
    assert folder.path.parent == tmp_path / "runs"
    assert folder.path.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@per_example
@given(st.one_of(names, st.sampled_from(["a" * 300, "a/" * 3000, "/dev/zero", "/", "."])))
def test_what_a_recipe_extends_is_read_and_nothing_else(tmp_path, name):
    path = write_recipe(tmp_path, dump({"name": "x", "extends": name}))
    before = tree(tmp_path)
    with pytest.raises(RecipeError, match="extends"):
        layers(path, (), [])
    assert tree(tmp_path) == before


@per_example
@given(st.one_of(names, st.sampled_from(["a" * 300, "a/" * 3000, "/dev/zero"])))
def test_a_recipe_that_is_none_is_an_error_and_writes_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        load(name, (), FakeCatalog())
    assert tree(tmp_path) == {}


def test_a_circle_of_links_is_no_recipe(tmp_path):
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(RecipeError, match="no such file"):
        find(tmp_path / "loop.yaml")


def test_a_copy_replaces_a_link_and_does_not_follow_it(tmp_path):
    recipe = load(write_recipe(tmp_path), (), FakeCatalog())
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").symlink_to(outside)
    copy_recipe(recipe, tmp_path / "run" / "recipe.yaml")
    assert outside.read_text() == "mine"
    assert (tmp_path / "run" / "recipe.yaml").read_text() == RECIPE


@pytest.mark.usefixtures("migrated_workspace")
def test_experiments_keep_their_artifacts_in_the_workspace(tmp_path):
    here = Workspace()
    store = Store(here)
    for name in HOSTILE:
        location = store.client.get_experiment(store.experiment(name)).artifact_location.removeprefix("file://")
        assert Path(location).resolve().parent == here.artifacts
    assert {path.name for path in tmp_path.iterdir()} == {here.root.name}


@pytest.mark.usefixtures("migrated_workspace")
@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\0b", "a" * 200])
def test_a_run_of_any_experiment_writes_in_the_workspace_alone(tmp_path, name):
    tracker = Tracker.open(Workspace(), run_folders.recipe("x", name, **{name: name}), {name: name})
    (tracker.run_dir / "note.txt").write_text("hello")
    tracker.artifact(tracker.run_dir / "note.txt")
    tracker.log({f"train/{name}": 1.0}, step=1)
    assert tracker.close("FINISHED")
    assert {path.name for path in tmp_path.iterdir()} == {Workspace().root.name}
    written = Workspace().artifacts.glob(f"{folder_name(name)}/*/artifacts/note.txt")
    assert [path.read_text() for path in written] == ["hello"]
    shutil.rmtree(Workspace().root)
    assert tree(tmp_path) == {}
