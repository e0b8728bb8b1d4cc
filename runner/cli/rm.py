"""The command ``rm``: removes runs."""

import os
import shlex
from dataclasses import asdict
from typing import Annotated

from typer import Argument, Option

from runner.cli import completion
from runner.cli.common import AsJson, print_json, run_folders, say, tell, working
from runner.system.errors import UsageError

Removed = Annotated[
    list[str] | None,
    Argument(
        metavar="[RUN...]",
        help="Names, digits or MLflow ids of runs.",
        autocompletion=completion.removable,
    ),
]
Purge = Annotated[bool, Option("--purge", help="Delete permanently; without a run, empty the trash.")]
Takeover = Annotated[
    bool,
    Option("--takeover", help="Also remove runs of another machine, where they must have stopped."),
]


def rm(runs: Removed = None, purge: Purge = False, takeover: Takeover = False, as_json: AsJson = False) -> None:
    """Remove runs: move their folders to the workspace's trash, and delete them in MLflow.

    A group of seeds is removed with all its runs. MLflow can restore deleted runs until
    [bold]mlflow gc[/]. A run that is training is refused. --purge deletes permanently; without a
    name, it empties the trash.

    [bold]runner rm 3f2a91c0[/]

    [bold]runner rm --purge[/]
    """
    from runner.tracking.lookup import find
    from runner.tracking.trash import empty, remove
    from runner.tracking.workspace import Workspace

    workspace = Workspace()
    if not runs and not purge:
        raise UsageError("name the runs to remove, or empty the trash: runner rm --purge")
    run_folders("rm")
    selected = [find(workspace.runs, name, *workspace.places[1:]) for name in runs or ()]
    # A run may be named twice.
    run_folders_by_name = {folder.name: folder for folder in selected}
    with working("rm", "removing"):
        removals = remove(workspace, list(run_folders_by_name.values()), purge, takeover)
        purged = [] if runs else empty(workspace)
    if as_json:
        print_json({"runs": [asdict(removal) for removal in removals], "purged": purged})
        return
    variable = ""
    if "MLFLOW_TRACKING_URI" not in os.environ:
        variable = f"MLFLOW_TRACKING_URI={shlex.quote(workspace.tracking_uri)} "
    for removal in removals:
        tell(f"{removal.run}: {removal.trash or 'deleted permanently'}; {removal.mlflow}")
        for run_id in removal.run_ids:
            say(f"MLflow restores it with: {variable}mlflow runs restore --run-id {run_id}")
    for name in purged:
        tell(f"{name}: deleted permanently")
    if not removals and not purged:
        say("the trash is empty")
