"""Commands that search: ``study plan``, ``run``, ``worker``, ``show`` and ``best``."""

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer import Argument, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    Sets,
    emit,
    output,
    registry_of,
    say,
    settings,
    working,
)
from runner.cli.help import Verb
from runner.cli.training import AllowDrift
from runner.system.errors import ExitCode, RunnerError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cli.study_progress import TrialsBar
    from runner.study.config import StudyConfig
    from runner.study.summary import Summary
    from runner.tracking import Workspace
    from runner.training.signals import Stop


class Executor(StrEnum):
    """Where the workers of a study run."""

    RAY = "ray"


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Search stages and hyperparameters of a recipe together, with Optuna.

[bold]runner study plan experiments/marl_search.yaml[/] print the space and the cost

[bold]runner study run experiments/marl_search.yaml[/] search; the same command continues after an interruption
""",
)
StudyFile = Annotated[str, Argument(metavar="STUDY", help="File of kind study.")]
Forecast = Annotated[
    bool,
    Option("--forecast/--no-forecast", help="Train the recipe for half a minute to forecast the time."),
]
Budget = Annotated[
    float | None,
    Option(min=1.0, metavar="SECONDS", help="Time for trials; replaces the file's budget.seconds."),
]
Fresh = Annotated[bool, Option("--fresh", help="Delete the trials of the study and start from the beginning.")]
On = Annotated[
    Executor | None,
    Option("--on", help="ray: start a worker in every slot of a Ray cluster; by default, budget.parallel here."),
]
Cpus = Annotated[int | None, Option(min=1, metavar="N", help="Cores of each worker on a cluster; default 1.")]
Gpus = Annotated[int | None, Option(min=0, metavar="N", help="GPUs of each worker on a cluster; default 0.")]
TrialNumber = Annotated[int | None, Option(min=0, metavar="NUMBER", help="Number of a trial; by default the best one.")]
StudyName = Annotated[
    str,
    Argument(
        metavar="STUDY",
        help="File of kind study, or name of a study.",
        autocompletion=completion.studies,
    ),
]


@app.command(cls=Verb)
def plan(
    study: StudyFile,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    budget: Budget = None,
    forecast: Forecast = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Print what a study will try, what it will cost, and what prevents it."""
    with working("study plan", "reading the study", quiet) as bar:
        from runner.study.definition import load_study
        from runner.study.plan import FORECAST_SECONDS
        from runner.study.plan import plan as look_ahead
        from runner.study.report import show_plan

        registry = registry_of(plugin)
        definition = load_study(study, settings(sets, bare), registry, budget)
        short = f"training the recipe for {FORECAST_SECONDS:.0f} s" if forecast else "looking ahead"
        with bar.phase(short):
            planned = look_ahead(definition, registry.files, forecast)
    output(as_json, lambda: asdict(planned), show_plan, planned)


@app.command(cls=Verb)
def run(
    study: StudyFile,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    budget: Budget = None,
    fresh: Fresh = False,
    allow_drift: AllowDrift = False,
    on: On = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search; after an interruption, the same command continues.

    Every trial runs in a separate process. A trial that runs out of memory, diverges, hangs or
    crashes is recorded with that cause, and the study continues. Report and best recipes are in
    [bold].runner/studies[/], trials in [bold].runner/optuna.db[/] or in OPTUNA_STORAGE.

    With --on ray, workers run on the Ray cluster at RAY_ADDRESS; OPTUNA_STORAGE names a server that
    all its nodes reach.

    [bold]runner study run experiments/marl_search.yaml[/]
    """
    if on is None and (cpus is not None or gpus is not None):
        raise UsageError("--cpus and --gpus are for workers on a cluster: add --on ray")
    with _bar("study run", quiet) as bar:
        from runner.study.definition import load_study
        from runner.study.local_workers import work_together
        from runner.study.store import forget
        from runner.study.worker import work
        from runner.tracking import Workspace

        workspace = Workspace()
        registry = registry_of(plugin)
        definition = load_study(study, settings(sets, bare), registry, budget)
        if fresh:
            forget(definition.config.name, workspace)

        def search(stop: "Stop") -> str:
            if on == Executor.RAY:
                from runner.study.ray_workers import Resources, work_on_ray

                slot = Resources(cpus or 1, gpus or 0)
                return work_on_ray(
                    definition, workspace, settings(sets, bare), registry.files, slot, stop, bar, allow_drift
                )
            if definition.config.budget.parallel == 1:
                return work(definition, workspace, registry.files, stop, bar, allow_drift)
            return work_together(definition, settings(sets, bare), registry.files, stop, bar, allow_drift)

        searched = _searched(search, definition.config, workspace, bar)
    _end(*searched, workspace, as_json)


@app.command(cls=Verb)
def worker(
    study: StudyName,
    bare: Bare = None,
    sets: Sets = None,
    plugin: Plugins = None,
    budget: Budget = None,
    allow_drift: AllowDrift = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Join a study as a worker, on this machine or on another one with the same OPTUNA_STORAGE.

    Any launcher can start workers; CUDA_VISIBLE_DEVICES gives each worker its device.

    [bold]CUDA_VISIBLE_DEVICES=1 runner study worker experiments/marl_search.yaml[/]
    """
    with _bar("study worker", quiet) as bar:
        from runner.study.definition import load_study
        from runner.study.store import file_of
        from runner.study.worker import work
        from runner.tracking import Workspace

        workspace = Workspace()
        registry = registry_of(plugin)
        file, initial_sets, seconds = file_of(study, workspace)
        all_sets = [*initial_sets, *settings(sets, bare)]
        definition = load_study(file, all_sets, registry, budget or seconds)

        def search(stop: "Stop") -> str:
            return work(definition, workspace, registry.files, stop, bar, allow_drift)

        searched = _searched(search, definition.config, workspace, bar)
    _end(*searched, workspace, as_json)


@app.command(cls=Verb)
def show(study: StudyName, as_json: AsJson = False) -> None:
    """Print the best trials, the importance of settings, the effect of stages, failures by cause, and the budget."""
    with working("study show", "reading the study"):
        from runner.study.report import write_report
        from runner.study.summary import find
        from runner.tracking import Workspace

        workspace = Workspace()
        summary = find(study, workspace)
        folder = workspace.studies / summary.name
        try:
            write_report(summary, folder)
        except OSError as error:
            say(f"the report was not written: {folder}: {error.strerror}")
    _show(summary, folder, as_json)


@app.command(cls=Verb)
def best(study: StudyName, trial: TrialNumber = None) -> None:
    """Print the recipe of the best trial, as YAML that runner run accepts.

    With several objectives, it is the trial of the Pareto front with the best first objective.

    [bold]runner study best marl_search > best.yaml[/]
    """
    with working("study best", "reading the study"):
        from runner.study.report import recipe_text
        from runner.study.summary import find
        from runner.tracking import Workspace

        summary = find(study, Workspace())
    if trial is None and not summary.best:
        raise RunnerError(
            f"study '{summary.name}' has no trial with a valid result yet; choose any trial with --trial NUMBER"
        )
    number = summary.best[0].number if trial is None else trial
    emit(recipe_text(summary, number), nl=False)


def _bar(verb: str, quiet: bool) -> "TrialsBar":
    """Returns a bar that shows the progress of a study on stderr inside the ``with``."""
    from runner.cli.study_progress import TrialsBar
    from runner.system.console import Console

    return TrialsBar(Console(stderr=True, quiet=quiet), verb)


def _searched(
    search: "Callable[[Stop], str]", config: "StudyConfig", workspace: "Workspace", bar: "TrialsBar"
) -> "tuple[Summary, str, Stop]":
    """Searches, and returns the summary, the reason why the search ended before all trials, and the
    signal that stopped it.
    """
    from runner.study.summary import find
    from runner.training.signals import stop_on_signals

    bar.opened(config)
    with stop_on_signals() as stop:
        reason = search(stop)
    with bar.phase("reading what came of it"):
        return find(config.name, workspace), reason, stop


def _end(summary: "Summary", reason: str, stop: "Stop", workspace: "Workspace", as_json: bool) -> NoReturn:
    """Shows what came of a search, and exits."""
    if stop:
        say("not all trials are finished; the same command continues")
    elif reason:
        say(f"not all trials are finished: {reason}; continue with a larger budget")
    _show(summary, workspace.studies / summary.name, as_json)
    # A study that was stopped may still find a valid configuration.
    if not summary.best and not stop:
        raise RunnerError("no trial has a valid result; the causes are printed above")
    raise typer.Exit(128 + int(stop.received) if stop.received else ExitCode.DONE)


def _show(summary: "Summary", folder: "Path", as_json: bool) -> None:
    from runner.study.report import REPORT
    from runner.study.report import show as show_summary

    locations = [f"report: {folder / REPORT}"]
    if summary.best:
        locations.append(f"best recipe: runner study best {folder.name} > best.yaml")
    locations.append(f"in a browser: {summary.dashboard}")
    output(as_json, summary.data, lambda console: show_summary(summary, console, locations))
