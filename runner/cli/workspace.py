"""Commands for runs, their workspace and the machine."""

import os
import shlex
import sys
from dataclasses import asdict
from typing import Annotated, Literal

from typer import Argument, Exit, Option

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Plugins,
    output,
    print_json,
    registry_of,
    run_folders,
    say,
    tell,
    working,
)
from runner.system.errors import ExitCode, StorageError, UsageError

Sent = Annotated[
    list[str] | None,
    Argument(
        metavar="[RUN...]",
        help="Runs to send; by default all with something to send.",
        autocompletion=completion.runs,
    ),
]
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
Runs = Annotated[
    list[str],
    Argument(
        metavar="RUN RUN...",
        help="Ids, unique beginnings of ids, names, or 'latest'.",
        autocompletion=completion.comparable,
    ),
]
Where = Annotated[
    list[str] | None,
    Option(
        metavar="METRIC>NUMBER",
        help="Only runs whose newest value fulfils this; also <, <=, >=, = and !=. Repeatable.",
    ),
]
OfRecipe = Annotated[
    str | None,
    Option(
        "--recipe",
        metavar="NAME",
        help="Only runs of this recipe; * matches anything.",
        autocompletion=completion.recipes,
    ),
]
OfKind = Annotated[
    Literal["run", "ablation", "study", "seeds"] | None,
    Option("--kind", help="Only this kind; seeds are groups of runs."),
]
Since = Annotated[
    str | None,
    Option(
        metavar="AGE|DATE",
        help="Only runs that started at most 2d, 3h or 30min ago, or since 2026-01-31.",
    ),
]
Everything = Annotated[
    bool,
    Option("--all", help="Also show what always differs or cannot matter: speed, load, process, tools."),
]
Browser = Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")]
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables; if one of them is set, a browser can be opened."""
Port = Annotated[int, Option(min=1, max=65535, help="Port; another free port is used if it is taken.")]


def ls(
    where: Where = None,
    recipe: OfRecipe = None,
    kind: OfKind = None,
    since: Since = None,
    as_json: AsJson = False,
) -> None:
    """List the runs, ablations, studies and groups of seeds of this workspace.

    The list contains status, progress, objective and overridden settings. A group of seeds has the
    mean of its runs with the 95 % interval; its runs are listed below it.

    Runs whose process has crashed are set to KILLED, here and in MLflow.

    [bold]runner ls[/]

    [bold]runner ls --recipe 'marl_*' --since 2d --where 'eval/return>0'[/]
    """
    from runner.tracking import Workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.selection import select

    run_folders("ls")
    all_runs = listing(Workspace())
    runs = select(all_runs, where or (), recipe, since, kind)
    none = f"none of {len(all_runs)} matches" if all_runs else ""
    output(as_json, lambda: {"runs": runs}, show, runs, none)


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


def sync(runs: Sent = None, as_json: AsJson = False) -> None:
    """Upload to MLflow what crashed runs left behind; repeating it changes nothing.

    [bold]runner sync[/]

    [bold]MLFLOW_TRACKING_URI=http://127.0.0.1:5000 runner sync latest[/]
    """
    from runner.tracking.lookup import find
    from runner.tracking.recovery import deliver
    from runner.tracking.spool import unsent
    from runner.tracking.workspace import Workspace

    workspace = Workspace()
    all_folders = run_folders("sync")
    if runs:
        folders = [find(workspace.runs, name) for name in runs]
    else:
        folders = [folder for folder in all_folders if unsent(folder.spool)]
    with working("sync", "sending"):
        deliveries = deliver(workspace, folders)
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
        raise StorageError("not everything could be sent; the remaining metrics stay in the folders of the runs")


def compare(runs: Runs, everything: Everything = False, as_json: AsJson = False) -> None:
    """Print the differences between runs: primary metrics, settings, environment, other metrics.

    For two groups that were trained with --seeds, it prints the difference of the means with a
    confidence interval.

    [bold]runner compare latest 3f2a91c0[/]
    """
    with working("compare", "reading the runs"):
        from runner.tracking import Workspace, comparison, comparison_view, seeds

        groups = seeds.compare(Workspace(), runs)
        compared = {} if groups is not None else comparison.compare(Workspace(), runs)
    if groups is not None:
        from runner.cli.seeds import show_comparison

        output(as_json, lambda: groups, show_comparison, groups)
        return
    output(as_json, lambda: compared, comparison_view.show, compared, everything)


def ui(port: Port = 5000, browser: Browser = True) -> None:
    """Open MLflow's page for this workspace, on 127.0.0.1, until Ctrl-C.

    A browser opens it if this is a terminal on a machine with a screen.

    [bold]runner ui --port 5001[/]
    """
    import webbrowser

    with working("ui", "importing MLflow") as bar:
        from runner.tracking import Workspace
        from runner.tracking.ui import serve

        def announce(address: str) -> None:
            bar.close()
            say(address)
            has_screen = sys.platform == "darwin" or any(map(os.environ.get, _SCREENS))
            if browser and sys.stderr.isatty() and has_screen:
                webbrowser.open(address)

        serve(Workspace(), announce, port, bar.phase)


def doctor(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Check this machine: devices, threads, bf16, packages, workspace, tracking store.

    The exit code is 1 if something is missing that every run needs.
    """
    with working("doctor", "looking at this machine"):
        from runner.cli.doctor import examine, show
        from runner.tracking import Workspace

        checks = examine(Workspace(), registry_of(plugin))
    ok = all(check.status != "fail" for check in checks)
    output(as_json, lambda: {"ok": ok, "checks": [asdict(check) for check in checks]}, show, checks)
    if not ok:
        raise Exit(ExitCode.FAILED)
