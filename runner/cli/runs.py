"""Verbs that train, and that look after runs, their workspace and the machine."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Argument, Exit, Option, echo

from runner.cli import completion
from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    RecipeName,
    Sets,
    output,
    print_json,
    registry_of,
    say,
    settings,
)
from runner.cli.plugins import fetched
from runner.system.errors import CheckpointError, ExitCode, StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cli.progress import ProgressDisplay
    from runner.plugin.registry import Registry
    from runner.recipe.lock import Drift
    from runner.recipe.recipe import Recipe
    from runner.tracking import RunFolder
    from runner.train.run import RunResult

GoOn = Annotated[bool, Option("--resume", help="Go on with the newest unfinished run of this recipe, if there is one.")]
Seeds = Annotated[int, Option("--seeds", min=1, help="Train with so many seeds, the recipe's own and those after it.")]
Parallel = Annotated[int, Option("--parallel", min=1, help="How many of them train at a time.")]
AllowDrift = Annotated[bool, Option("--allow-drift", help="Resume although recipe, code or packages have changed.")]
Download = Annotated[bool, Option("--download", help="Fetch the published files that its data need.")]
Tags = Annotated[
    list[str] | None, Option("--tag", metavar="NAME=VALUE", help="A tag of the run, in MLflow too; may be repeated.")
]
Note = Annotated[str, Option(metavar="TEXT", help="What to remember about the run; its description in MLflow.")]
Run = Annotated[
    str,
    Argument(
        metavar="[RUN]", help="Name, digits or MLflow id, a beginning of these, or 'latest'.",
        autocompletion=completion.runs,
    ),
]  # fmt: skip
Sent = Annotated[
    list[str] | None,
    Argument(metavar="[RUN...]", help="By default all that have something to send.", autocompletion=completion.runs),
]
Removed = Annotated[
    list[str] | None,
    Argument(metavar="[RUN...]", help="Names, digits or ids, as for resume.", autocompletion=completion.removable),
]
Purge = Annotated[bool, Option("--purge", help="Delete for good; without a run, what is in the trash.")]
Runs = Annotated[
    list[str],
    Argument(
        metavar="RUN RUN...", help="Ids, unique beginnings of ids, names, or 'latest'.",
        autocompletion=completion.runs,
    ),
]  # fmt: skip
Where = Annotated[
    list[str] | None,
    Option(metavar="METRIC>NUMBER", help="Whose newest value is so; <, <=, >=, = and != too; may be repeated."),
]
OfRecipe = Annotated[
    str | None,
    Option(
        "--recipe", metavar="NAME", help="Of this recipe; * stands for anything.", autocompletion=completion.recipes
    ),
]
Since = Annotated[
    str | None, Option(metavar="AGE|DATE", help="Begun no longer ago than 2d, 3h or 30min, or since 2026-01-31.")
]
Everything = Annotated[
    bool, Option("--all", help="Also what is another every time, or cannot matter: speed, load, process, tools.")
]
Browser = Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")]
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables of which one tells that a browser can be shown."""
Port = Annotated[int, Option(min=1, max=65535, help="The next free one is taken if it is busy.")]


def run(
    recipe: RecipeName, bare: Bare = None, sets: Sets = None, plugin: Plugins = None, go_on: GoOn = False,
    allow_drift: AllowDrift = False, download: Download = False, tag: Tags = None, note: Note = "",
    seeds: Seeds = 1, parallel: Parallel = 1, quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a recipe and log it to MLflow.

    The run's folder, with its lock, metrics and checkpoints, is in [bold].runner/runs[/]; RUNNER_WORKSPACE names
    another workspace, MLFLOW_TRACKING_URI another MLflow store.

    With --resume the same command can be given again and again, by a scheduler for example: it goes on where the last
    one was killed, and begins anew only if there is nothing to go on with.

    With --seeds each seed is a run of its own, and the means of all have an interval; --resume goes on with those that
    are not finished.

    [bold]runner run marl_phase2[/]

    [bold]runner run digits_classifier --seeds 5 --parallel 2[/]

    [bold]runner run recipes/marl_phase2.yaml data.followers=2 optimization.amp=off[/]
    """
    from runner.recipe.loader import find, is_lock, load, secret_assignments

    registry, given, path = registry_of(plugin), settings(sets, bare), find(recipe)
    own_tags = dict(map(_tag, tag or ()))
    changes: list[Drift] = []
    if is_lock(path):
        loaded, registry, changes = _load_lock(path, given, registry, f"runner run {recipe}")
    else:
        loaded = load(path, given, registry)
    if download:
        for file in loaded.data.absent():
            fetched(file)
    if seeds > 1:
        from runner.cli.seeds import run_seeds

        _say_drift(changes)
        _folders()
        recipes = {loaded.seed + n: load(path, [*given, f"seed={loaded.seed + n}"], registry) for n in range(seeds)}
        more = ["--seeds", str(seeds), "--parallel", str(parallel), "--resume"]
        words = ["runner", "run", recipe, *(part for each in given for part in ("--set", each)), *more]
        again = registry.command(shlex.join(words))
        run_seeds(recipes, registry, parallel, go_on, own_tags, note, again, quiet, as_json)
    if go_on:
        for folder in _folders():
            record = folder.record()
            if record is not None and record.digest == loaded.digest and not folder.resumable:
                given = [*secret_assignments(loaded), *given]  # what the lock does not have
                resume(folder.name, given, allow_drift=allow_drift, plugin=plugin, quiet=quiet, as_json=as_json)
    _say_drift(changes)

    def begin(display: "ProgressDisplay") -> "RunResult":
        from runner.tracking import Workspace
        from runner.train.run import run as train

        return train(loaded, registry, Workspace(), display, own_tags=own_tags, note=note)

    _train(loaded, quiet, as_json, begin)


def resume(
    run: Run = "latest", bare: Bare = None, sets: Sets = None, allow_drift: AllowDrift = False,
    plugin: Plugins = None, quiet: Quiet = False, as_json: AsJson = False,
) -> NoReturn:  # fmt: skip
    """Go on with a run that was killed, stopped or failed, from its newest checkpoint that is whole.

    On a CPU it comes out bit for bit as if it had never been interrupted. 'latest' is the newest run that can be
    resumed.

    [bold]runner resume[/]

    [bold]runner resume marl_phase2-3f2a91c0[/]
    """
    from runner.recipe.lock import LOCK_NAME
    from runner.tracking.workspace import Workspace, find

    if "=" in run:  # no run is named
        run, bare = "latest", [run, *(bare or ())]
    found, runs = _folders(), Workspace().runs
    folder = find(runs, run) if run != "latest" else next((each for each in found if not each.resumable), None)
    if folder is None:
        why = "".join(f"\n    {each.name}: {each.resumable}" for each in found[:8])
        raise UsageError(f"no run in {runs} can be resumed{':' + why if why else ''}")
    lock, registry = folder.path / LOCK_NAME, registry_of(plugin)
    if reason := folder.resumable:
        error = UsageError if lock.exists() else CheckpointError
        raise error(f"run {folder.name} cannot be resumed: {reason}")
    recipe, registry, changes = _load_lock(lock, settings(sets, bare), registry, f"runner resume {folder.name}")
    _say_drift(changes)
    drifted = [str(change) for change in changes if change.matters]
    if drifted and not allow_drift:
        raise UsageError(
            f"run {folder.name} would not go on as it began: {len(drifted)} of the changes above matter; undo them, or "
            "accept them with --allow-drift"
        )

    def begin(display: "ProgressDisplay") -> "RunResult":
        from runner.train.run import run as train

        return train(recipe, registry, Workspace(), display, folder, drifted)

    say(f"resuming {folder.name}")
    _train(recipe, quiet, as_json, begin)


def ls(where: Where = None, recipe: OfRecipe = None, since: Since = None, as_json: AsJson = False) -> None:
    """List the runs, ablations and studies of this workspace: status, progress, objective, what was overridden.

    Runs whose process died without a word are set to KILLED, here and in MLflow.

    [bold]runner ls[/]

    [bold]runner ls --recipe 'marl_*' --since 2d --where 'eval/return>0'[/]
    """
    from runner.tracking import Workspace
    from runner.tracking.listing import listing, show
    from runner.tracking.selection import select

    _folders()
    known = listing(Workspace())
    runs = select(known, where or (), recipe, since)
    none = f"none of {len(known)} fits" if known else ""
    output(as_json, lambda: {"runs": runs}, show, runs, none)


def rm(runs: Removed = None, purge: Purge = False, as_json: AsJson = False) -> None:
    """Remove runs: their folders go to the workspace's trash, and MLflow deletes its own.

    MLflow can restore what it has deleted, and forgets it with [bold]mlflow gc[/]. A run that is being trained is
    refused. --purge deletes for good, and without a name it empties the trash.

    [bold]runner rm 3f2a91c0[/]

    [bold]runner rm --purge[/]
    """
    from runner.tracking.trash import empty, remove
    from runner.tracking.workspace import Workspace, find

    here = Workspace()
    if not runs and not purge:
        raise UsageError("name the runs to remove, or empty the trash: runner rm --purge")
    _folders()
    chosen = {
        folder.name: folder for folder in (find(here.runs, name, here.ablations, here.studies) for name in runs or ())
    }
    removals = remove(here, list(chosen.values()), purge)
    purged = [] if runs else empty(here)
    if as_json:
        print_json({"runs": [asdict(each) for each in removals], "purged": purged})
        return
    for each in removals:
        echo(f"{each.run}: {each.trash or 'gone for good'}; {each.mlflow}")
        for run_id in each.run_ids[:1]:
            say(f"MLflow restores it with: mlflow runs restore --run-id {run_id}")
    for name in purged:
        echo(f"{name}: gone for good")
    if not removals and not purged:
        say("the trash is empty")


def sync(runs: Sent = None, as_json: AsJson = False) -> None:
    """Send MLflow what it lacks of runs whose process is dead; sending twice changes nothing.

    [bold]runner sync[/]

    [bold]MLFLOW_TRACKING_URI=http://127.0.0.1:5000 runner sync latest[/]
    """
    from runner.tracking.recovery import deliver
    from runner.tracking.spool import unsent
    from runner.tracking.workspace import Workspace, find

    here, found = Workspace(), _folders()
    chosen = [find(here.runs, name) for name in runs or ()]
    deliveries = deliver(here, chosen or [each for each in found if unsent(each.spool)])
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


def compare(runs: Runs, everything: Everything = False, as_json: AsJson = False) -> None:
    """Print what differs between runs: headline metrics, settings, environment, other metrics; and MLflow's page.

    Of two groups that were trained with --seeds, by how much their means differ, and how sure that is.

    [bold]runner compare latest 3f2a91c0[/]
    """
    from runner.tracking import Workspace, comparison, seeds

    groups = seeds.compare(Workspace(), runs)
    if groups is not None:
        from runner.cli.seeds import show_comparison

        output(as_json, lambda: groups, show_comparison, groups)
        return
    compared = comparison.compare(Workspace(), runs)
    output(as_json, lambda: compared, comparison.show, compared, everything)


def ui(port: Port = 5000, browser: Browser = True) -> None:
    """Open MLflow's own page for this workspace, on 127.0.0.1, until Ctrl-C.

    The browser shows it, if this is a terminal on a machine with a screen.

    [bold]runner ui --port 5001[/]
    """
    import webbrowser

    from runner.tracking import Workspace
    from runner.tracking.ui import serve

    def announce(address: str) -> None:
        say(address)
        if browser and sys.stderr.isatty() and (sys.platform == "darwin" or any(map(os.environ.get, _SCREENS))):
            webbrowser.open(address)

    serve(Workspace(), port, announce)


def doctor(plugin: Plugins = None, as_json: AsJson = False) -> None:
    """Say what this machine offers: devices, threads, bf16, packages, writable workspace, store reachable.

    The exit code is 1 if something that every run needs is missing.
    """
    from runner.cli.doctor import examine, show
    from runner.tracking import Workspace

    checks = examine(Workspace(), registry_of(plugin))
    ok = all(check.status != "fail" for check in checks)
    output(as_json, lambda: {"ok": ok, "checks": [asdict(check) for check in checks]}, show, checks)
    if not ok:
        raise Exit(ExitCode.FAILED)


def _folders() -> "list[RunFolder]":
    """All runs, the newest first; those whose process died without a word have been given their end."""
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import Workspace, folders

    here = Workspace()
    reap(here)
    return folders(here.runs)


def _load_lock(
    lock: "Path", sets: Sequence[str], registry: "Registry", command: str
) -> "tuple[Recipe, Registry, list[Drift]]":
    """The recipe of a lock, the plugins with its own, and what has changed since.

    Plugin files of a run of this workspace are found again where they were, if they are as they were. Of any other lock
    they have to be named, because a lock from elsewhere must not run code. That they are not is a UsageError, with the
    command that has them.
    """
    from runner.plugin.registry import Registry
    from runner.recipe.loader import load
    from runner.recipe.lock import drift, plugins_again, read_lock
    from runner.tracking.workspace import Workspace

    again = plugins_again(read_lock(lock), registry.files)
    is_own = lock.absolute().parent.parent == Workspace().runs
    if again and (not is_own or any(again.values())):
        names, whole = ", ".join(path.name for path in again), registry.command(command, again)
        why = "".join(f", and {path.name} {reason}" for path, reason in again.items() if reason and is_own)
        raise UsageError(f"{lock.parent.name} was trained with plugins of {names}{why}; the command is: {whole}")
    for path in again:
        say(f"with the plugins of {path}, which is unchanged")
    registry = Registry([*registry.files, *again])
    recipe = load(lock, sets, registry)
    return recipe, registry, drift(lock, recipe, registry)


def _tag(text: str) -> tuple[str, str]:
    """What --tag says."""
    name, equals, value = text.partition("=")
    if not equals or not name or name.startswith("mlflow."):
        raise UsageError(f"--tag '{text}': should be NAME=VALUE, and NAME not begin with 'mlflow.', as MLflow's own do")
    return name, value


def _say_drift(changes: "Sequence[Drift]") -> None:
    for change in changes:
        say(f"drift: {change}")


def _train(recipe: "Recipe", quiet: bool, as_json: bool, train: "Callable[[ProgressDisplay], RunResult]") -> NoReturn:
    """Trains before a person's eyes, shows what came of it, and exits."""
    from rich.console import Console

    from runner.cli.progress import ProgressDisplay, show

    with ProgressDisplay(Console(stderr=True, quiet=quiet), recipe) as display:
        result = train(display)
    output(as_json, result.data, show, result, recipe.headline)
    raise Exit(result.exit_code)
