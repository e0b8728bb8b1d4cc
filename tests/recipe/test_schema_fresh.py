import json
from importlib.metadata import entry_points
from pathlib import Path

import runner.recipes
from runner.plugin.registry import GROUP, Registry
from runner.recipe.schema import schema


def test_the_schema_beside_the_recipes_is_that_of_the_built_in_plugins():
    built_in = [each for each in entry_points(group=GROUP) if each.dist and each.dist.name == "proven-runner"]
    stored = Path(runner.recipes.__path__[0], "recipe.schema.json")
    assert stored.is_file(), "write it: runner schema > recipes/recipe.schema.json"
    fresh = schema(Registry(installed=built_in))
    assert json.loads(stored.read_text()) == fresh, "stale: runner schema > recipes/recipe.schema.json"
