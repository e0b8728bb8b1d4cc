"""Errors about settings that show only when a recipe is assembled or trained, with their places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runner.recipe.recipe import Recipe
from runner.recipe.yaml_nodes import DEFAULT, Place, Problem, RecipeError
from runner.system.errors import UsageError


@contextmanager
def located(recipe: Recipe) -> Iterator[None]:
    """Adds the place of the setting to a UsageError inside the ``with`` that begins with one.

    Sources and learners know the setting to blame, but not the file in which it is written.
    """
    try:
        yield
    except RecipeError:
        raise
    except UsageError as error:
        path, _, message = str(error).partition(": ")
        origin = last_origin(recipe, path)
        if origin == DEFAULT:
            raise
        raise RecipeError([Problem(origin, path, message)]) from error


def last_origin(recipe: Recipe, path: str) -> Place:
    """Returns the last of the places in recipes that influence a stage.

    The command line wins over the file, and the file over those that it extends.
    """
    origins = [
        origin
        for key, origin in recipe.origins.items()
        if f"{key}.".startswith(f"{path}.") and origin != DEFAULT
    ]

    def precedence(origin: Place) -> tuple[bool, bool]:
        return isinstance(origin.source, str), origin.source == recipe.path

    return max(origins, key=precedence, default=DEFAULT)


def recipe_error(recipe: Recipe, path: str, message: str) -> RecipeError:
    """Returns the error about a setting, with the place where it was written."""
    origin = recipe.origins.get(path, DEFAULT)
    return RecipeError([Problem(origin, path, message)])
