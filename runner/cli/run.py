"""The verbs that train: ``run`` and ``resume``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Argument, Exit, Option

from runner.cli.common import AsJson, PluginFiles, Quiet, RecipeName, Sets, output, registry_of, say
from runner.system.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cli.progress import ProgressDisplay
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.tracking import RunFolder
    from runner.train.run import RunResult

DriftOption = Annotated[
    bool, Option("--allow-drift", help="Resume although recipe, code or packages have changed since.")
]


def run(
    recipe: RecipeName,
    sets: Sets = None,
    plugin: PluginFiles = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with the newest unfinished run of this recipe, if there is one.")
    ] = False,
    allow_drift: DriftOption = False,
    download: Annotated[bool, Option("--download", help="Fetch the published files that its data need.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe and log it to MLflow.

    The run's folder, with its lock, metrics and checkpoints, is in [bold].runner/runs[/]; RUNNER_WORKSPACE names
    another workspace, MLFLOW_TRACKING_URI another MLflow store.

    With --resume the same command can be given again and again, by a scheduler for example: it goes on where the last
    one was killed, and begins anew only if there is nothing to go on with.

    [bold]runner run marl_phase2[/]

    [bold]runner run recipes/marl_phase2.yaml --set data.followers=2 --set optimization.amp=off[/]
    """
    from runner.recipe.loader import find, is_lock, load, secret_assignments
    from runner.recipe.lock import drift

    registry = registry_of(plugin)
    if is_lock(found := find(recipe)):
        _refuse_without_plugins(found, registry, f"runner run {recipe}")
    loaded = load(recipe, sets or (), registry)
    if download:
        from runner.cli.data import fetched

        for file in loaded.data.absent():
            fetched(file)
    unfinished = _unfinished(loaded.digest) if resume else None
    if unfinished is not None:
        given = [*secret_assignments(loaded), *(sets or ())]  # what the lock does not have
        _resume(unfinished, registry, given, allow_drift, quiet, as_json)
    if is_lock(loaded.path):
        for change in drift(loaded.path, loaded, registry):
            say(f"drift: {change}")

    from runner.tracking import workspace
    from runner.train.run import run as train

    with _display(loaded, quiet) as display:
        result = train(loaded, registry, workspace(), display)
    _conclude(result, loaded, as_json)


def resume(
    run: Annotated[
        str, Argument(metavar="[RUN]", help="A name, its digits, MLflow's id, the beginning of one, or 'latest'.")
    ] = "latest",
    allow_drift: DriftOption = False,
    sets: Sets = None,
    plugin: PluginFiles = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was killed, stopped or failed, from its newest checkpoint that is whole.

    On a CPU it comes out bit for bit as if it had never been interrupted. 'latest' is the newest run that can be
    resumed.

    [bold]runner resume[/]

    [bold]runner resume marl_phase2-3f2a91c0[/]
    """
    from runner.tracking import workspace
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import find, folders

    here = workspace()
    reap(here)
    if run == "latest":
        found = folders(here.runs)
        folder = next((each for each in found if not each.resumable), None)
        if folder is None:
            why = "".join(f"\n    {each.name}: {each.resumable}" for each in found[:8])
            raise UsageError(f"no run in {here.runs} can be resumed{':' + why if why else ''}")
    else:
        folder = find(here.runs, run)
    _resume(folder, registry_of(plugin), sets or (), allow_drift, quiet, as_json)


def _unfinished(digest: str) -> "RunFolder | None":
    """The newest run of a recipe that can be resumed."""
    from runner.tracking import workspace
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import folders

    here = workspace()
    reap(here)
    for folder in folders(here.runs):
        record = folder.record()
        if record is not None and record.digest == digest and not folder.resumable:
            return folder
    return None


def _resume(
    folder: "RunFolder", registry: "Registry", sets: Sequence[str], allow_drift: bool, quiet: bool, as_json: bool
) -> NoReturn:
    from runner.recipe.loader import load
    from runner.recipe.lock import LOCK_NAME, drift

    lock = folder.path / LOCK_NAME
    if reason := folder.resumable:
        error = UsageError if lock.exists() else CheckpointError
        raise error(f"run {folder.name} cannot be resumed: {reason}")
    _refuse_without_plugins(lock, registry, f"runner resume {folder.name}")
    recipe = load(lock, sets, registry)
    changes = drift(lock, recipe, registry)
    for change in changes:
        say(f"drift: {change}")
    drifted = [str(change) for change in changes if change.matters]
    if drifted and not allow_drift:
        raise UsageError(
            f"run {folder.name} would not go on as it began: {len(drifted)} of the changes above matter; undo them, or "
            "accept them with --allow-drift"
        )

    from runner.tracking import workspace
    from runner.train.run import resume as train_on

    say(f"resuming {folder.name}")
    with _display(recipe, quiet) as display:
        result = train_on(recipe, registry, workspace(), folder, display, drifted)
    _conclude(result, recipe, as_json)


def _refuse_without_plugins(lock: "Path", registry: "Registry", command: str) -> None:
    """Says which plugin files a lock needs that are not on the command line, and the command that has them."""
    from runner.recipe.lock import missing_plugins, read_lock

    missing = missing_plugins(read_lock(lock), registry.files)
    if missing:
        names = ", ".join(path.name for path in missing)
        whole = registry.command(command, missing)
        raise UsageError(f"{lock.parent.name} was trained with plugins of {names}; the command is: {whole}")


def _display(recipe: "Recipe", quiet: bool) -> "ProgressDisplay":
    from rich.console import Console

    from runner.cli.progress import ProgressDisplay

    unit, length = recipe.length
    return ProgressDisplay(Console(stderr=True, quiet=quiet), recipe.name, length, unit, recipe.headline)


def _conclude(result: "RunResult", recipe: "Recipe", as_json: bool) -> NoReturn:
    """Shows what came of a training, and exits."""
    from runner.cli.progress import show

    output(as_json, result.data, show, result, recipe.headline)
    raise Exit(result.exit_code)
