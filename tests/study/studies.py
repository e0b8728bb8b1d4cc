"""Studies of recipes that exist for tests alone: read from files, never trained."""

import pytest
from faces import FakeCatalog, write_recipe

from runner.recipe.yaml_nodes import RecipeError
from runner.study.definition import load_study

HEAD = "kind: study\nname: mine\nrecipe: recipe.yaml\n"
SPACE = "space:\n  model.lr: {float: [1e-4, 1e-2], log: true}\n"
AIMS = "objectives: {eval/return: maximize}\n"


def study_text(space=SPACE, aims=AIMS, more=""):
    """A study's file whose space begins on line 4."""
    return HEAD + space + aims + more


def read(folder, text=None, *sets, catalog=None):
    """The study of a file beside the recipe of ``faces``."""
    write_recipe(folder)
    path = folder / "study.yaml"
    path.write_text(study_text() if text is None else text, encoding="utf-8")
    return load_study(path, sets, catalog or FakeCatalog())


def problems(folder, text, *sets):
    """What is wrong with it: line, column, path, message, place."""
    with pytest.raises(RecipeError) as caught:
        read(folder, text, *sets)
    return [(p.place.line, p.place.column, p.path, p.message, str(p.place)) for p in caught.value.problems]
