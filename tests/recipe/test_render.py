import os
from pathlib import Path
from typing import ClassVar

from faces import RECIPE, FakeCatalog, Net, Uniform, write_recipe
from pydantic import Field, SecretStr, computed_field

from runner.recipe.loader import load
from runner.recipe.rendering import render
from runner.recipe.yaml_nodes import parse


class Elaborate(Net):
    """A net whose settings are of many types."""

    kind: ClassVar[str] = "elaborate"

    doubled: frozenset[int] = frozenset({1})
    folder: Path = Path("somewhere")
    replay: Uniform = Uniform(capacity=7)
    token: SecretStr = Field(default_factory=lambda: SecretStr(os.environ["TOKEN_HERE"]))

    @computed_field
    @property
    def depth(self) -> int:
        return len(self.hidden)


class ElaborateCatalog(FakeCatalog):
    faces: ClassVar = {**FakeCatalog.faces, "model": (Elaborate,)}


def test_a_printed_recipe_of_another_plugin_is_read_again_with_all_its_types(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_HERE", "hunter2-token")
    sets = ("model={kind: elaborate, doubled: [2, 3], folder: ' a #b'}", "optimizer={lr: 1e-20}")
    recipe = load(write_recipe(tmp_path), sets, ElaborateCatalog())
    printed = "\n".join(render(recipe.printable(), recipe.origins))
    again = load(write_recipe(tmp_path, printed, "printed.yaml"), (), ElaborateCatalog())
    assert again.values(masked=False) == recipe.values(masked=False)
    assert again.model.folder == Path(" a #b")
    assert "hunter2" not in printed


def test_only_a_value_that_differs_from_its_default_counts_as_changed(monkeypatch):
    monkeypatch.setenv("TOKEN_HERE", "hunter2-token")
    assert Elaborate(doubled=frozenset({1}), replay=Uniform(capacity=7)).is_default("replay.capacity")
    assert not Elaborate(replay=Uniform()).is_default("replay.capacity")
    assert Elaborate(hidden=[8]).is_default("hidden")
    assert not Elaborate(hidden=[8, 8]).is_default("hidden")


def test_a_rendered_recipe_reads_back_with_and_without_origins(tmp_path):
    recipe = load(write_recipe(tmp_path), ("optimization.stack=off",), FakeCatalog())
    for origins in (None, recipe.origins):
        text = "\n".join(render(recipe.values(), origins))
        assert parse(text, "text", []).plain() == recipe.values()


def test_origins_stand_behind_the_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load(write_recipe(tmp_path, RECIPE), ("seed=8",), FakeCatalog())
    lines = [line.split("  # ") for line in render(recipe.values(), recipe.origins)]
    origins = {parts[0].strip(): parts[1] for parts in lines if len(parts) == 2}
    assert origins["seed: 8"] == "override seed=8"
    assert origins["hidden: [8]"] == "default"
    assert origins["size: 5"] == "recipe.yaml:9:17"
