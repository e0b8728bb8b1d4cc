"""Verbs that look after a workspace, its runs and the machine: ``ls``, ``sync``, ``compare``, ``ui`` and ``doctor``."""

from dataclasses import asdict
from typing import Annotated

from typer import Argument, Exit, Option, echo

from runner.cli.common import AsJson, PluginFiles, output, print_json, registry_of, say
from runner.system.errors import ExitCode, StorageError

Sent = Annotated[
    list[str] | None, Argument(metavar="[RUN...]", help="Which runs; all that have something to send by default.")
]
Compared = Annotated[
    list[str], Argument(metavar="RUN RUN...", help="Ids, unique beginnings of ids, names, or 'latest'.")
]
Port = Annotated[int, Option(min=1, max=65535, help="The next free one is taken if it is busy.")]


def ls(as_json: AsJson = False) -> None:
    """List the runs of this workspace: status, progress, last checkpoint, and whether they can be resumed.

    Runs whose process died without a word are set to KILLED, here and in MLflow.

    [bold]runner ls[/]
    """
    from runner.tracking import workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.recovery import reap

    here = workspace()
    reap(here)
    runs = listing(here)
    output(as_json, lambda: {"runs": runs}, show, runs)


def sync(runs: Sent = None, as_json: AsJson = False) -> None:
    """Send MLflow what it lacks of runs whose process is dead; sending twice changes nothing.

    [bold]runner sync[/]

    [bold]MLFLOW_TRACKING_URI=http://127.0.0.1:5000 runner sync latest[/]
    """
    from runner.tracking import workspace
    from runner.tracking.recovery import deliver, reap
    from runner.tracking.spool import unsent
    from runner.tracking.workspace import find, folders

    here = workspace()
    reap(here)
    chosen = [find(here.runs, name) for name in runs or ()]
    deliveries = deliver(here, chosen or [each for each in folders(here.runs) if unsent(each.spool)])
    if as_json:
        print_json({"runs": [asdict(delivery) for delivery in deliveries]})
    else:
        for each in deliveries:
            what = each.problem or ("its own process sends it" if each.alive else f"{each.sent_bytes} bytes sent")
            echo(f"{each.run}: {what}")
        if not deliveries:
            say("nothing to send: MLflow has everything")
    if any(delivery.problem for delivery in deliveries):
        raise StorageError("not everything could be sent; what is left stays in the runs' folders")


def compare(runs: Compared, as_json: AsJson = False) -> None:
    """Print what differs between runs: settings, environment, then metrics; and the link to MLflow's page.

    [bold]runner compare latest 3f2a91c0[/]
    """
    from runner.tracking import comparison, workspace

    compared = comparison.compare(workspace(), runs)
    output(as_json, compared.to_json, comparison.show, compared)


def ui(port: Port = 5000) -> None:
    """Open MLflow's own page for this workspace, on 127.0.0.1, until Ctrl-C.

    [bold]runner ui --port 5001[/]
    """
    from runner.tracking import workspace
    from runner.tracking.ui import serve

    serve(workspace(), port, say)


def doctor(plugin: PluginFiles = None, as_json: AsJson = False) -> None:
    """Say what this machine offers: devices, threads, bf16, packages, writable workspace, store reachable.

    The exit code is 1 if something that every run needs is missing.
    """
    from runner.cli.doctor import data, examine, failed, show
    from runner.tracking import workspace

    checks = examine(workspace(), registry_of(plugin))
    output(as_json, lambda: data(checks), show, checks)
    if failed(checks):
        raise Exit(ExitCode.FAILED)
