from faces import RECIPE, FakeCatalog, write_recipe

from runner.recipe.document import parse, render
from runner.recipe.loader import load


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
    assert origins["seed: 8"] == "--set #1 seed=8"
    assert origins["hidden: [8]"] == "default"
    assert origins["size: 5"] == "recipe.yaml:9:17"
