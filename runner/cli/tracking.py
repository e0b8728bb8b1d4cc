"""Verbs that look at what was tracked, and at the machine: ``compare``, ``ui`` and ``doctor``."""

from typing import Annotated

import typer

from runner.cli.common import JsonOption, PluginOption, open_registry, print_json, say
from runner.system.errors import ExitCode, RunnerError

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN RUN...", help="Ids, unique beginnings of ids, names, or 'latest'.")
]
PortOption = Annotated[int, typer.Option("--port", min=1, max=65535, help="The next free one is taken if it is busy.")]


def add_to(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command("compare")(compare_runs)
    app.command()(ui)
    app.command()(doctor)


def compare_runs(runs: Runs, as_json: JsonOption = False) -> None:
    """Print what differs between runs: settings, environment, then metrics; and the link to MLflow's page.

    [bold]runner compare latest 3f2a91c0[/]
    """
    from rich.console import Console

    from runner.tracking import workspace
    from runner.tracking.comparison import compare, show

    comparison = compare(workspace(), runs)
    if as_json:
        print_json(comparison.to_json())
    else:
        show(comparison, Console())


def ui(port: PortOption = 5000) -> None:
    """Open MLflow's own page for this workspace, on 127.0.0.1, until Ctrl-C.

    [bold]runner ui --port 5001[/]
    """
    from runner.tracking import workspace
    from runner.tracking.ui import serve

    serve(workspace(), port, say)


def doctor(plugin: PluginOption = None, as_json: JsonOption = False) -> None:
    """Say what this machine offers: devices, threads, bf16, packages, writable workspace, store reachable.

    The exit code is 1 if something that every run needs is missing.
    """
    from rich.console import Console

    from runner.cli.doctor import examine, failed, show, to_json
    from runner.recipe.catalog import SECTIONS
    from runner.tracking import workspace

    registry = open_registry(plugin)
    broken = {}
    for section in SECTIONS:
        for kind in registry.kinds(section):
            try:
                registry.get(section, kind)
            except RunnerError as error:
                broken[f"{section}.{kind}"] = str(error)
    checks = examine(workspace(), broken)
    if as_json:
        print_json(to_json(checks))
    else:
        show(checks, Console())
    if failed(checks):
        raise typer.Exit(ExitCode.FAILED)
