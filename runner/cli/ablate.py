"""The verb that measures: ``ablate``."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from runner.cli.common import JsonOption, PluginOption, SetOption, open_registry, print_json, say

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="EXPERIMENT|RECIPE", help="A file of kind ablation, a recipe, or a recipe that ships.")
]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", min=1.0, metavar="SECONDS", help="Time to measure, instead of the file's."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Where the result goes, instead of the workspace.")
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Begin anew, although an interrupted ablation could be continued.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def add_to(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(ablate)


def ablate(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    plugin: PluginOption = None,
    budget: BudgetOption = None,
    out: OutOption = None,
    fresh: FreshOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what every stage is worth on this machine.

    The baseline (twice), each stage alone, each phase, all, and all but each run in child processes that take turns.
    The report, with tables, plots and the recipe to use, is in [bold].runner/ablations[/]; --out names another folder.
    Given again after an interruption, the same command goes on.

    Exit codes: 0 done, 3 the gate failed a variant, 4 this machine is too noisy to tell.

    [bold]runner ablate experiments/marl_phases/marl_phases.yaml[/]

    [bold]runner ablate marl_phase3 --set data.followers=1 --budget 300[/]
    """
    from runner.measure.ablate import ablate as measure
    from runner.measure.experiment import load_experiment
    from runner.tracking import workspace
    from runner.verify.gate import quick

    registry = open_registry(plugin)
    loaded = load_experiment(experiment, sets or (), registry)
    if budget is not None:
        loaded = loaded.within(budget)
    command = shlex.join(["runner", *sys.argv[1:]])
    done = measure(loaded, registry, workspace(), out, fresh, command, quick, _silent if quiet else say)
    if as_json:
        print_json(done.data())
    else:
        from rich.console import Console

        from runner.measure.report import show

        show(done.result, Console())
    raise typer.Exit(done.exit_code)


def _silent(_text: str) -> None:
    """Shows nothing."""
