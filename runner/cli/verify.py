"""The verb that says whether stages are harmless: ``verify``."""

import signal
import sys
from typing import Annotated

import typer

from runner.cli.common import JsonOption, PluginOption, RecipeArgument, SetOption, open_registry, print_json, say
from runner.system.errors import ExitCode

UpdatesOption = Annotated[
    int, typer.Option("--updates", min=2, help="Updates that are compared for Exact and Close stages.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Length of a training for Statistical stages; the recipe's own.")
]
SeedsOption = Annotated[int, typer.Option("--seeds", min=3, help="The most pairs of trainings for one stage.")]
BudgetOption = Annotated[float, typer.Option("--budget", min=0, help="Seconds after which no training is begun.")]
StageOption = Annotated[
    list[str] | None, typer.Option("--stage", help="Only this stage, or 'all' for the recipe; may be repeated.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(verify)


def verify(
    recipe: RecipeArgument,
    sets: SetOption = None,
    plugin: PluginOption = None,
    stage: StageOption = None,
    updates: UpdatesOption = 20,
    steps: StepsOption = None,
    seeds: SeedsOption = 8,
    budget: BudgetOption = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Say whether the stages of a recipe keep what they promise, each alone and all together.

    Exact: the same bits as without. Close: the same algebra in float64, and no more rounding than the baseline in
    float32. Statistical: whole trainings with paired seeds, until it is clear that no more than the margin is lost.

    The exit code is 0 if all pass, 3 if one fails, 4 if something is not clear.

    [bold]runner verify marl_phase1[/]

    [bold]runner verify marl_phase2 --stage amp --seeds 4[/]
    """
    from rich.console import Console

    from runner.recipe.loader import load

    registry = open_registry(plugin)
    loaded = load(recipe, sets or (), registry)

    from runner.verify.gate import Options, show, verify_recipe

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))  # trainings in child processes end, too
    report = verify_recipe(loaded, registry, Options(updates, steps, seeds, budget, tuple(stage or ())), say)
    if as_json:
        print_json(report.data())
    else:
        show(report, Console())
    raise typer.Exit(report.exit_code)
