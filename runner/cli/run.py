"""The verb that trains: ``run``."""

from typing import Annotated

import typer

from runner.cli.common import JsonOption, PluginOption, RecipeArgument, SetOption, open_registry, print_json, say

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(run)


def run(
    recipe: RecipeArgument,
    sets: SetOption = None,
    plugin: PluginOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe and log it to MLflow.

    The run's folder, with its lock, metrics and checkpoints, is in [bold].runner/runs[/]; RUNNER_WORKSPACE names
    another workspace, MLFLOW_TRACKING_URI another MLflow store.

    [bold]runner run marl_phase2[/]

    [bold]runner run recipes/marl_phase2.yaml --set data.followers=2 --set optimization.amp=off[/]
    """
    from rich.console import Console

    from runner.recipe import drift, is_lock, load

    registry = open_registry(plugin)
    loaded = load(recipe, sets or (), registry)
    if is_lock(loaded.path):
        for line in drift(loaded.path, loaded, registry):
            say(f"drift: {line}")

    from runner.engine.run import run as train
    from runner.report.closing import show
    from runner.report.progress import ProgressDisplay
    from runner.tracking import workspace

    goal, unit = (loaded.train.env_steps, "steps") if loaded.data.simulates else (loaded.train.updates, "updates")
    assert goal is not None  # validation sees to it
    talk = Console(stderr=True, quiet=quiet)
    with ProgressDisplay(talk, loaded.name, goal, unit, loaded.data.headline) as display:
        result = train(loaded, registry, workspace(), display)
    if as_json:
        print_json(result.data())
    else:
        show(result, Console(), loaded.data.headline)
    raise typer.Exit(result.exit_code)
