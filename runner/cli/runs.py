"""Verbs that look after the runs of a workspace: ``ls`` and ``sync``."""

from typing import Annotated

import typer

from runner.cli.common import JsonOption, print_json, say
from runner.system.errors import StorageError

RunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN...]", help="Which runs; all that have something to send by default.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command("ls")(list_runs)
    app.command()(sync)


def list_runs(as_json: JsonOption = False) -> None:
    """List the runs of this workspace: status, progress, last checkpoint, and whether they can be resumed.

    Runs whose process died without a word are set to KILLED, here and in MLflow.

    [bold]runner ls[/]
    """
    from rich.console import Console

    from runner.tracking import workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.recovery import reap

    here = workspace()
    reap(here)
    runs = listing(here)
    if as_json:
        print_json({"runs": runs})
    else:
        show(runs, Console())


def sync(runs: RunsArgument = None, as_json: JsonOption = False) -> None:
    """Send MLflow what it lacks of runs whose process is dead; sending twice changes nothing.

    [bold]runner sync[/]

    [bold]MLFLOW_TRACKING_URI=http://127.0.0.1:5000 runner sync latest[/]
    """
    import dataclasses

    from runner.tracking import workspace
    from runner.tracking.recovery import deliver, reap
    from runner.tracking.spool import unsent
    from runner.tracking.workspace import find, folders

    here = workspace()
    reap(here)
    chosen = [find(here.runs, name) for name in runs or ()]
    deliveries = deliver(here, chosen or [each for each in folders(here.runs) if unsent(each.spool)])
    if as_json:
        print_json({"runs": [dataclasses.asdict(delivery) for delivery in deliveries]})
    else:
        for each in deliveries:
            what = each.problem or ("its own process sends it" if each.alive else f"{each.sent_bytes} bytes sent")
            typer.echo(f"{each.run}: {what}")
        if not deliveries:
            say("nothing to send: MLflow has everything")
    if any(delivery.problem for delivery in deliveries):
        raise StorageError("not everything could be sent; what is left stays in the runs' folders")
