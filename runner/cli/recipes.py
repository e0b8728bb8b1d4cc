"""Commands that read recipes: ``validate``, ``show``, ``recipes`` and ``schema``."""

import json
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Sets,
    emit,
    load_recipe,
    output,
    print_json,
    registry_of,
    run_folders,
    say,
    settings,
    tell,
)
from runner.cli.results import results
from runner.cli.trouble import report
from runner.system.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from runner.tracking import RunFolder

Recipes = Annotated[
    list[str],
    Argument(
        metavar="RECIPE...",
        help="Recipe files, or names of recipes that ship.",
        autocompletion=completion.recipes,
    ),
]
RecipeOrRun = Annotated[
    str,
    Argument(
        metavar="RECIPE|RUN",
        help="Recipe as for run; or a run by name, digits, MLflow id or 'latest'.",
        autocompletion=completion.recipes_and_runs,
    ),
]


class FileSort(StrEnum):
    """Type of a YAML file that the runner reads."""

    recipe = "recipe"
    study = "study"
    ablation = "ablation"


SchemaOf = Annotated[FileSort, Argument(help="Kind of file.")]
Origin = Annotated[bool, Option("--origin", help="Print where every value was written.")]
Copied = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Copy this recipe to NAME.yaml in the current folder.",
        autocompletion=completion.recipes,
    ),
]


def validate(recipe: Recipes, sets: Sets = None, plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Check recipes and print every problem, with file, line and column.

    The exit code is 2 if there is a problem. Arguments of the form A.B.C=VALUE are settings, as with --set.

    [bold]runner validate recipes/*.yaml[/]
    """
    from runner.recipe.document import RecipeError
    from runner.recipe.loader import load

    given = [each for each in recipe if "=" in each and not Path(each).exists()]
    registry = registry_of(plugin)
    results: list[dict[str, Any]] = []
    for reference in (each for each in recipe if each not in given):
        try:
            loaded = load(reference, settings(sets, given), registry)
        except RecipeError as error:
            problems = [
                {
                    "source": str(each.place.source),
                    "line": each.place.line,
                    "column": each.place.column,
                }
                | {"path": each.path, "message": each.message}
                for each in error.problems
            ]
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


def show(
    recipe: RecipeOrRun, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, origin: Origin = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Print a recipe with all its values resolved, or the summary of a run.

    [bold]runner show marl_phase2 --origin[/]

    [bold]runner show 3f2a91c0[/]
    """
    from runner.recipe.rendering import render

    if (folder := _run_of(recipe)) is not None:
        if sets or bare or origin:
            raise UsageError(f"{folder.name} is a run, whose settings are in {folder.path / 'recipe.lock.yaml'}")
        from runner.tracking.card import show as show_card
        from runner.tracking.listing import described
        from runner.tracking.lookup import below
        from runner.tracking.workspace import Workspace

        run = described(folder)
        runs = [described(each) for each in reversed(below(Workspace(), folder.name))] if run["kind"] == "seeds" else []
        output(as_json, lambda: {"run": run} | ({"runs": runs} if runs else {}), show_card, run, runs)
        return
    loaded, _ = load_recipe("show", recipe, settings(sets, bare), plugin)
    if as_json:
        origins = {path: str(place) for path, place in loaded.origins.items()}
        print_json({"recipe": loaded.printable(), "digest": loaded.digest} | ({"origins": origins} if origin else {}))
    else:
        for line in render(loaded.printable(), loaded.origins if origin else None):
            value, _, place = line.rpartition(" # ")
            fits = len(line) <= get_terminal_size().columns or not results.stream.isatty()
            emit(line if fits or not value else f"{value.rstrip()}\n    # {place}")


def _run_of(reference: str) -> "RunFolder | None":
    """The run, ablation, study or group of seeds that is meant, by its name or its folder; None if a recipe is."""
    from runner.recipe.document import RecipeError
    from runner.recipe.loader import find as find_recipe
    from runner.tracking.lookup import find, folders
    from runner.tracking.workspace import RunFolder, Workspace

    folder, here = RunFolder(Path(reference).absolute()), Workspace()
    if folder.record() is not None:
        return folder
    try:
        find_recipe(reference)
        return None
    except RecipeError as no_recipe:
        run_folders("show")
        if not folders(*here.places) and reference != "latest":
            raise
        try:
            return find(here.runs, reference, *here.places[1:])
        except UsageError as no_run:
            if reference == "latest":
                raise
            raise UsageError(f"{no_recipe}\n{no_run}") from None


def recipes(copy: Copied = None, as_json: AsJson = False) -> None:
    """List the recipes that ship, or copy one as a start.

    [bold]runner recipes --copy marl_phase2[/]
    """
    from runner.recipe.loader import shipped
    from runner.system.names import suggestion

    found = shipped()
    if copy is not None:
        bare = copy.removesuffix(".yaml")
        if bare not in found:
            raise UsageError(f"no recipe '{copy}' ships{suggestion(bare, found)}")
        target = Path(f"{bare}.yaml")
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(found[bare].read_text(encoding="utf-8"))
        except FileExistsError:
            raise UsageError(f"{target} exists already, and is not overwritten") from None
        emit(target)
        say("for completion in your editor: runner schema > recipe.schema.json")
        return
    listing = [{"name": name, "path": str(path), "summary": _first_comment(path)} for name, path in found.items()]
    if as_json:
        print_json({"recipes": listing})
        return
    width = max(map(len, found), default=0)
    for each in listing:
        tell(f"{each['name']:{width}}  {each['summary']}".rstrip(), hang=width + 2)


def schema(of: SchemaOf = FileSort.recipe, plugin: Plugins = None) -> None:
    """Print the JSON Schema of recipes, with all registered plugins, or of ablation or study files.

    [bold]runner schema > recipe.schema.json[/]

    [bold]runner schema study > study.schema.json[/]
    """
    from runner.recipe.schema import experiment_schema
    from runner.recipe.schema import schema as recipe_schema

    if of is FileSort.recipe:
        document = recipe_schema(registry_of(plugin))
    elif of is FileSort.study:
        from runner.study.config import StudyConfig

        document = experiment_schema(StudyConfig, "Study")
    else:
        from runner.measure.experiment import AblationConfig

        document = experiment_schema(AblationConfig, "Ablation")
    emit(json.dumps(document, indent=2, ensure_ascii=False))


def _first_comment(path: Path) -> str:
    """The first line of the comment at the top of a recipe, past the line for editors."""
    comment = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return next(
        (line.removeprefix("#").strip() for line in comment if "yaml-language-server" not in line),
        "",
    )
