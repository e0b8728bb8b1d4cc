"""The command ``show``: prints a resolved recipe, or the summary of a run."""

from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from runner.cli import completion
from runner.cli.common import AsJson, Bare, Plugins, Sets, emit, load_recipe, output, print_json, run_folders, settings
from runner.cli.results import results
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.tracking import RunFolder

RecipeOrRun = Annotated[
    str,
    Argument(
        metavar="RECIPE|RUN",
        help="Recipe as for run; or a run by name, digits, MLflow id or 'latest'.",
        autocompletion=completion.recipes_and_runs,
    ),
]
Origin = Annotated[bool, Option("--origin", help="Print where every value was written.")]


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
    from runner.tracking.record import GROUPS
    from runner.tracking.run_summary import show as show_card
    from runner.tracking.workspace import Workspace

    run = described(folder)
    members = []
    if run["kind"] in GROUPS:
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
