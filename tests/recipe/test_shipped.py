import pytest

from runner.plugin.registry import Registry
from runner.recipe.loader import load, shipped


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_that_ships_is_valid_and_named_like_its_file(name):
    recipe = load(name, (), Registry())
    assert recipe.name == name
    assert recipe.path == shipped()[name]
