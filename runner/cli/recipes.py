"""Verbs that read recipes: ``validate``, ``show`` and ``recipes``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runner.cli.common import (
    JsonOption,
    PluginOption,
    RecipeArgument,
    SetOption,
    open_registry,
    print_json,
    report,
    say,
)
from runner.system.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from runner.recipe.document import Problem
    from runner.recipe.recipe import Recipe

Recipes = Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Recipe files, or names of recipes that ship.")]
OriginOption = Annotated[bool, typer.Option("--origin", help="Say after every value where it was written.")]
CopyOption = Annotated[
    str | None, typer.Option("--copy", metavar="NAME", help="Copy this one to NAME.yaml in the current folder.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command()(validate)
    app.command()(show)
    app.command()(recipes)


def validate(recipe: Recipes, sets: SetOption = None, plugin: PluginOption = None, as_json: JsonOption = False) -> None:
    """Check recipes and say everything that is wrong with them.

    Every problem is shown with its file, line and column; the exit code is 2 if there is any.

    [bold]runner validate recipes/*.yaml[/]
    """
    from runner.recipe.document import RecipeError
    from runner.recipe.loader import load

    registry = open_registry(plugin)
    results: list[dict[str, Any]] = []
    for reference in recipe:
        try:
            loaded = load(reference, sets or (), registry)
        except RecipeError as error:
            results.append({"recipe": reference, "valid": False, "problems": [_problem(p) for p in error.problems]})
            if not as_json:
                report(error)
        else:
            results.append({"recipe": reference, "valid": True, "problems": [], "digest": loaded.digest})
            if not as_json:
                typer.echo(f"{reference}: valid ({_summary(loaded)})")
    valid = all(result["valid"] for result in results)
    if as_json:
        print_json({"valid": valid, "recipes": results})
    if not valid:
        raise typer.Exit(ExitCode.USAGE)


def show(
    recipe: RecipeArgument,
    sets: SetOption = None,
    plugin: PluginOption = None,
    origin: OriginOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print a recipe with nothing left to extends, --set and defaults.

    [bold]runner show marl_phase2 --origin[/]
    """
    from runner.recipe.loader import load
    from runner.recipe.render import render

    loaded = load(recipe, sets or (), open_registry(plugin))
    if as_json:
        origins = {path: str(place) for path, place in loaded.origins.items()}
        print_json({"recipe": loaded.values(), "digest": loaded.digest} | ({"origins": origins} if origin else {}))
    else:
        typer.echo("\n".join(render(loaded.values(), loaded.origins if origin else None)))


def recipes(copy: CopyOption = None, as_json: JsonOption = False) -> None:
    """List the recipes that ship, or copy one to start your own.

    [bold]runner recipes --copy marl_phase2[/]
    """
    from runner.recipe.loader import shipped

    found = shipped()
    if copy is not None:
        _copy(copy, found)
        return
    listing = [{"name": name, "path": str(path), "summary": _first_comment(path)} for name, path in found.items()]
    if as_json:
        print_json({"recipes": listing})
        return
    width = max(map(len, found), default=0)
    for each in listing:
        typer.echo(f"{each['name']:{width}}  {each['summary']}".rstrip())


def _copy(name: str, found: dict[str, Path]) -> None:
    from runner.system.names import suggestion

    bare = name.removesuffix(".yaml")
    if bare not in found:
        raise UsageError(f"no recipe '{name}' ships{suggestion(bare, found)}")
    target = Path(f"{bare}.yaml")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(found[bare].read_text(encoding="utf-8"))
    except FileExistsError:
        raise UsageError(f"{target} exists already, and is not overwritten") from None
    typer.echo(target)
    say("for completion in your editor: runner schema > recipe.schema.json")


def _first_comment(path: Path) -> str:
    """The first line of the comment at the top of a recipe, past the line for editors."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            return line.removeprefix("#").strip()
    return ""


def _summary(recipe: "Recipe") -> str:
    stages = ", ".join(recipe.stages) or "no stage"
    return f"{recipe.model.kind} on {recipe.data.kind} with {stages}"


def _problem(problem: "Problem") -> dict[str, Any]:
    place = problem.place
    return {
        "source": str(place.source),
        "line": place.line,
        "column": place.column,
        "path": problem.path,
        "message": problem.message,
    }
