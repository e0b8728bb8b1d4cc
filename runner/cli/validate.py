"""The command ``validate``: prints the problems of recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit

from runner.cli import completion
from runner.cli.common import AsJson, Plugins, Sets, print_json, registry_of, settings, tell
from runner.cli.trouble import report
from runner.system.errors import ExitCode

if TYPE_CHECKING:
    from runner.recipe.yaml_nodes import Problem

Recipes = Annotated[
    list[str],
    Argument(
        metavar="RECIPE...",
        help="Recipe files, or names of recipes that ship.",
        autocompletion=completion.recipes,
    ),
]


def validate(recipe: Recipes, sets: Sets = None, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Check recipes and print every problem, with file, line and column.

    The exit code is 2 if there is a problem. Arguments of the form A.B.C=VALUE are settings, as with --set.

    [bold]runner validate recipes/*.yaml[/]
    """
    from runner.recipe.loader import load
    from runner.recipe.yaml_nodes import RecipeError

    bare = [word for word in recipe if "=" in word and not Path(word).exists()]
    registry = registry_of(plugin)
    results: list[dict[str, Any]] = []
    for reference in recipe:
        if reference in bare:
            continue
        try:
            loaded = load(reference, settings(sets, bare), registry)
        except RecipeError as error:
            problems = [_problem_data(problem) for problem in error.problems]
            results.append({"recipe": reference, "valid": False, "problems": problems})
            if not as_json:
                report(error)
        else:
            results.append({"recipe": reference, "valid": True, "problems": [], "digest": loaded.digest})
            if not as_json:
                stages = ", ".join(loaded.stages) or "no stage"
                tell(f"{reference}: valid ({loaded.model.kind} on {loaded.data.kind} with {stages})")
    valid = all(result["valid"] for result in results)
    if as_json:
        print_json({"valid": valid, "recipes": results})
    if not valid:
        raise Exit(ExitCode.USAGE)


def _problem_data(problem: "Problem") -> dict[str, Any]:
    return {
        "source": str(problem.place.source),
        "line": problem.place.line,
        "column": problem.place.column,
        "path": problem.path,
        "message": problem.message,
    }
