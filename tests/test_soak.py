"""The script that kills trainings has settings for every recipe."""

import sys
from pathlib import Path

import pytest
from running import RECIPES, tiny

FOLDER = Path(__file__).parents[1] / "experiments" / "soak"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_has_settings_that_fit(name):
    sys.path.insert(0, str(FOLDER))
    try:
        import soak
    finally:
        sys.path.remove(str(FOLDER))
    recipe = tiny(name, *soak.settings_of(name))
    assert recipe.length[1] > 1
