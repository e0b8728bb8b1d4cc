"""The command ``sync``: uploads to MLflow what it does not have of runs and groups of runs."""

from dataclasses import asdict
from typing import Annotated

from typer import Argument

from runner.cli import completion
from runner.cli.common import AsJson, print_json, run_folders, say, tell, working
from runner.system.errors import StorageError

Sent = Annotated[
    list[str] | None,
    Argument(
        metavar="[RUN...]",
        help="Runs and groups of runs to send; by default all with something to send.",
        autocompletion=completion.comparable,
    ),
]


def sync(runs: Sent = None, as_json: AsJson = False) -> None:
    """Send metrics of runs and groups that MLflow does not have; repeating it changes nothing.

    [bold]runner sync[/]

    [bold]MLFLOW_TRACKING_URI=http://127.0.0.1:5000 runner sync latest[/]
    """
    from runner.tracking.lookup import find, folders
    from runner.tracking.recovery import deliver
    from runner.tracking.spool import unsent
    from runner.tracking.workspace import Workspace

    workspace = Workspace()
    all_folders = [*run_folders("sync"), *folders(workspace.seeds)]
    if runs:
        selected = [find(workspace.runs, name, workspace.seeds) for name in runs]
    else:
        selected = [folder for folder in all_folders if unsent(folder.spool)]
    with working("sync", "sending"):
        deliveries = deliver(workspace, selected)
    if as_json:
        print_json({"runs": [asdict(delivery) for delivery in deliveries]})
    else:
        for delivery in deliveries:
            result = "its process sends it" if delivery.alive else f"{delivery.sent_bytes} bytes sent"
            tell(f"{delivery.run}: {delivery.problem or result}")
        if not deliveries:
            say("nothing to send: MLflow is complete")
    # After the output, so that all deliveries are listed.
    if any(delivery.problem for delivery in deliveries):
        raise StorageError("not everything could be sent; the remaining metrics stay in the folders named above")
