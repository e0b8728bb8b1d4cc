"""What files of experiments have in common: they name a recipe, and change it by assignments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from runner.recipe.document import Node, Place, Problem, RecipeError
from runner.recipe.fill import fill

Model = TypeVar("Model", bound=BaseModel)


def fill_experiment(model: type[Model], kind: str, what: str, root: Node, problems: list[Problem]) -> Model:
    """An experiment's settings, from a file of its kind; one of another cannot be ``what``, for example ``ablated``.

    Raises:
        RecipeError: everything that is wrong with it, with the problems found so far, each at its line.
    """
    given = root.get("kind")
    if given is not None and given.value != kind:
        raise RecipeError([given.problem("kind", f"{given.shown} is nothing that can be {what}: should be '{kind}'")])
    filled = fill(model, root, "", problems)
    if filled is None or problems:
        raise RecipeError(problems)
    return filled


def beside(path: Path, reference: str) -> str | Path:
    """A recipe as an experiment's file names it: seen from the file's folder, or else the name of one that ships."""
    found = path.parent / reference
    return found if found.is_file() else reference


def moved(problem: Problem, written: Sequence[Node], recipe: Node) -> Problem:
    """A problem that ``load`` found in an assignment, at the place in the experiment's file where that stands.

    ``written`` are the first assignments that ``load`` was given; later ones came from the command line. ``recipe`` is
    where the file names its recipe.
    """
    place, source = problem.place, str(problem.place.source)
    if place == Place(source):  # no such recipe
        return replace(problem, place=recipe.place, path="recipe", message=f"'{source}': {problem.message}")
    if isinstance(place.source, Path) or not source.startswith("--set #"):
        return problem
    number = int(source.removeprefix("--set #"))
    if number > len(written):  # on the command line, where it is counted without those of the file
        return replace(problem, place=replace(place, source=f"--set #{number - len(written)}"))
    node = written[number - 1]
    is_quoted = node.spelled[:1] in "'\""
    column = node.place.column + max(0, place.column - 1) + is_quoted
    return replace(problem, place=replace(node.place, column=column))
