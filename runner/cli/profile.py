"""The verb that says where the time of an update goes: ``profile``."""

from pathlib import Path
from typing import Annotated

import typer

from runner.cli.common import JsonOption, PluginOption, RecipeArgument, SetOption, open_registry, print_json

UpdatesOption = Annotated[int, typer.Option("--updates", min=1, max=1000, help="Updates that are profiled.")]
WarmupOption = Annotated[
    float,
    typer.Option("--warmup", min=0, metavar="SECONDS", help="The longest to wait, once compiled, for steady updates."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Where the trace goes, instead of the workspace.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(profile)


def profile(
    recipe: RecipeArgument,
    sets: SetOption = None,
    plugin: PluginOption = None,
    updates: UpdatesOption = 5,
    warmup: WarmupOption = 60.0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say where the time of an update goes: slots, operators and kernels, host syncs.

    A few updates are profiled once they are steady, and timed without the profiler, too. Their Chrome trace is in
    [bold].runner/profiles[/]; --out names another folder.

    [bold]runner profile marl_phase2[/]

    [bold]runner profile marl_baseline --set data.followers=1 --updates 20 --json[/]
    """
    from rich.console import Console

    from runner.recipe.loader import load

    registry = open_registry(plugin)
    loaded = load(recipe, sets or (), registry)

    from runner.measure.profile import profile as measure
    from runner.measure.profile_report import show
    from runner.tracking import workspace

    result = measure(loaded, registry, workspace(), out, updates, warmup)
    if as_json:
        print_json(result.data())
    else:
        show(result, Console())
