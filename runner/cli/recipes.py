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
    from runner.recipe.yaml_nodes import Problem
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


def show(
    recipe: RecipeOrRun,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    origin: Origin = False,
    as_json: AsJson = False,
) -> None:
    """Print a recipe with all its values resolved, or the summary of a run.

    [bold]runner show marl_phase2 --origin[/]

    [bold]runner show 3f2a91c0[/]
    """
    from runner.recipe.rendering import render

    folder = _run_of(recipe)
    if folder is not None:
        if sets or bare or origin:
            raise UsageError(f"{folder.name} is a run, whose settings are in {folder.path / 'recipe.lock.yaml'}")
        _show_run(folder, as_json)
        return
    loaded, _ = load_recipe("show", recipe, settings(sets, bare), plugin)
    if as_json:
        document = {"recipe": loaded.printable(), "digest": loaded.digest}
        if origin:
            document["origins"] = {path: str(position) for path, position in loaded.origins.items()}
        print_json(document)
        return
    for line in render(loaded.printable(), loaded.origins if origin else None):
        # On a narrow terminal an origin is below its value, so that columns stay readable.
        value, _, comment = line.rpartition(" # ")
        fits = len(line) <= get_terminal_size().columns or not results.stream.isatty()
        emit(line if fits or not value else f"{value.rstrip()}\n    # {comment}")


def _show_run(folder: "RunFolder", as_json: bool) -> None:
    """Prints the summary of a run, with the runs of a group of seeds."""
    from runner.tracking.listing import described
    from runner.tracking.lookup import below
    from runner.tracking.run_summary import show as show_card
    from runner.tracking.workspace import Workspace

    run = described(folder)
    members = []
    if run["kind"] == "seeds":
        members = [described(member) for member in reversed(below(Workspace(), folder.name))]

    def data() -> dict[str, Any]:
        return {"run": run, "runs": members} if members else {"run": run}

    output(as_json, data, show_card, run, members)


def _run_of(reference: str) -> "RunFolder | None":
    """The run, ablation, study or group of seeds that is meant, by its name or its folder; None if a recipe is."""
    from runner.recipe.loader import find as find_recipe
    from runner.recipe.yaml_nodes import RecipeError
    from runner.tracking.lookup import find, folders
    from runner.tracking.workspace import RunFolder, Workspace

    workspace = Workspace()
    folder = RunFolder(Path(reference).absolute())
    if folder.record() is not None:
        return folder
    try:
        find_recipe(reference)
        return None
    except RecipeError as no_recipe:
        run_folders("show")
        if not folders(*workspace.places) and reference != "latest":
            raise
        try:
            return find(workspace.runs, reference, *workspace.places[1:])
        except UsageError as no_run:
            if reference == "latest":
                raise
            raise UsageError(f"{no_recipe}\n{no_run}") from None


def recipes(copy: Copied = None, as_json: AsJson = False) -> None:
    """List the recipes that ship, or copy one as a start.

    [bold]runner recipes --copy marl_phase2[/]
    """
    from runner.recipe.loader import shipped
    from runner.system.suggestions import suggestion

    paths = shipped()
    if copy is not None:
        name = copy.removesuffix(".yaml")
        if name not in paths:
            raise UsageError(f"no recipe '{copy}' ships{suggestion(name, paths)}")
        target = Path(f"{name}.yaml")
        try:
            # Mode x refuses a file that exists, without a gap between check and creation.
            with target.open("x", encoding="utf-8") as file:
                file.write(paths[name].read_text(encoding="utf-8"))
        except FileExistsError:
            raise UsageError(f"{target} exists already, and is not overwritten") from None
        emit(target)
        say("for completion in your editor: runner schema > recipe.schema.json")
        return
    listing = [{"name": name, "path": str(path), "summary": _first_comment(path)} for name, path in paths.items()]
    if as_json:
        print_json({"recipes": listing})
        return
    width = max(map(len, paths), default=0)
    for entry in listing:
        tell(f"{entry['name']:{width}}  {entry['summary']}".rstrip(), hang=width + 2)


def schema(of: SchemaOf = FileSort.recipe, plugin: Plugins = None) -> None:
    """Print the JSON Schema of recipes, with all registered plugins, or of ablation or study files.

    [bold]runner schema > recipe.schema.json[/]

    [bold]runner schema study > study.schema.json[/]
    """
    from runner.recipe.schema import experiment_schema
    from runner.recipe.schema import schema as recipe_schema

    # Each branch imports only the class that it describes.
    if of is FileSort.recipe:
        document = recipe_schema(registry_of(plugin))
    elif of is FileSort.study:
        from runner.study.config import StudyConfig

        document = experiment_schema(StudyConfig, "Study")
    else:
        from runner.ablation.experiment import AblationConfig

        document = experiment_schema(AblationConfig, "Ablation")
    emit(json.dumps(document, indent=2, ensure_ascii=False))


def _first_comment(path: Path) -> str:
    """The first line of the comment at the top of a recipe, past the line for editors."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return next(
        (line.removeprefix("#").strip() for line in comment if "yaml-language-server" not in line),
        "",
    )
