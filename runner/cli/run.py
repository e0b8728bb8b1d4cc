"""The verbs that train: ``run`` and ``resume``."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Argument, Exit, Option

from runner.cli.common import AsJson, PluginFiles, Quiet, RecipeName, Sets, output, registry_of, say
from runner.cli.data import fetched
from runner.system.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cli.progress import ProgressDisplay
    from runner.plugin.registry import Registry
    from runner.recipe.recipe import Recipe
    from runner.tracking import RunFolder
    from runner.train.run import RunResult

Resumes = Annotated[
    bool, Option("--resume", help="Go on with the newest unfinished run of this recipe, if there is one.")
]
AllowDrift = Annotated[
    bool, Option("--allow-drift", help="Resume although recipe, code or packages have changed since.")
]
Download = Annotated[bool, Option("--download", help="Fetch the published files that its data need.")]
RunName = Annotated[
    str, Argument(metavar="[RUN]", help="A name, its digits, MLflow's id, the beginning of one, or 'latest'.")
]


def run(
    recipe: RecipeName, sets: Sets = None, plugin: PluginFiles = None, resume: Resumes = False,
    allow_drift: AllowDrift = False, download: Download = False, quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a recipe and log it to MLflow.

    The run's folder, with its lock, metrics and checkpoints, is in [bold].runner/runs[/]; RUNNER_WORKSPACE names
    another workspace, MLFLOW_TRACKING_URI another MLflow store.

    With --resume the same command can be given again and again, by a scheduler for example: it goes on where the last
    one was killed, and begins anew only if there is nothing to go on with.

    [bold]runner run marl_phase2[/]

    [bold]runner run recipes/marl_phase2.yaml --set data.followers=2 --set optimization.amp=off[/]
    """
    from runner.recipe.loader import find, is_lock, load, secret_assignments

    registry, given, path = registry_of(plugin), sets or (), find(recipe)
    if is_lock(path):
        loaded, _ = _load_lock(path, given, registry, f"runner run {recipe}")
    else:
        loaded = load(path, given, registry)
    if download:
        for file in loaded.data.absent():
            fetched(file)
    if resume:
        for folder in _folders():
            record = folder.record()
            if record is not None and record.digest == loaded.digest and not folder.resumable:
                given = [*secret_assignments(loaded), *given]  # what the lock does not have
                _resume(folder, registry, given, allow_drift, quiet, as_json)

    from runner.tracking import workspace
    from runner.train.run import run as train

    _train(loaded, quiet, as_json, lambda display: train(loaded, registry, workspace(), display))


def resume(
    run: RunName = "latest", allow_drift: AllowDrift = False, sets: Sets = None, plugin: PluginFiles = None,
    quiet: Quiet = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Go on with a run that was killed, stopped or failed, from its newest checkpoint that is whole.

    On a CPU it comes out bit for bit as if it had never been interrupted. 'latest' is the newest run that can be
    resumed.

    [bold]runner resume[/]

    [bold]runner resume marl_phase2-3f2a91c0[/]
    """
    from runner.tracking.workspace import find, workspace

    found, runs = _folders(), workspace().runs
    if run != "latest":
        folder = find(runs, run)
    elif (newest := next((each for each in found if not each.resumable), None)) is not None:
        folder = newest
    else:
        why = "".join(f"\n    {each.name}: {each.resumable}" for each in found[:8])
        raise UsageError(f"no run in {runs} can be resumed{':' + why if why else ''}")
    _resume(folder, registry_of(plugin), sets or (), allow_drift, quiet, as_json)


def _folders() -> "list[RunFolder]":
    """All runs, the newest first; those whose process died without a word have been given their end."""
    from runner.tracking.recovery import reap
    from runner.tracking.workspace import folders, workspace

    here = workspace()
    reap(here)
    return folders(here.runs)


def _load_lock(lock: "Path", sets: Sequence[str], registry: "Registry", command: str) -> "tuple[Recipe, list[str]]":
    """The recipe of a lock, and what has changed since that matters; says all that has.

    Plugin files that the lock needs and the command line lacks are a UsageError, with the command that has them.
    """
    from runner.recipe.loader import load
    from runner.recipe.lock import drift, missing_plugins, read_lock

    missing = missing_plugins(read_lock(lock), registry.files)
    if missing:
        names, whole = ", ".join(path.name for path in missing), registry.command(command, missing)
        raise UsageError(f"{lock.parent.name} was trained with plugins of {names}; the command is: {whole}")
    recipe = load(lock, sets, registry)
    changes = drift(lock, recipe, registry)
    for change in changes:
        say(f"drift: {change}")
    return recipe, [str(change) for change in changes if change.matters]


def _resume(
    folder: "RunFolder", registry: "Registry", sets: Sequence[str], allow_drift: bool, quiet: bool, as_json: bool
) -> NoReturn:
    from runner.recipe.lock import LOCK_NAME

    lock = folder.path / LOCK_NAME
    if reason := folder.resumable:
        error = UsageError if lock.exists() else CheckpointError
        raise error(f"run {folder.name} cannot be resumed: {reason}")
    recipe, drifted = _load_lock(lock, sets, registry, f"runner resume {folder.name}")
    if drifted and not allow_drift:
        raise UsageError(
            f"run {folder.name} would not go on as it began: {len(drifted)} of the changes above matter; undo them, or "
            "accept them with --allow-drift"
        )

    from runner.tracking import workspace
    from runner.train.run import resume as train_on

    say(f"resuming {folder.name}")
    _train(recipe, quiet, as_json, lambda display: train_on(recipe, registry, workspace(), folder, display, drifted))


def _train(recipe: "Recipe", quiet: bool, as_json: bool, train: "Callable[[ProgressDisplay], RunResult]") -> NoReturn:
    """Trains before a person's eyes, shows what came of it, and exits."""
    from rich.console import Console

    from runner.cli.progress import ProgressDisplay, show

    unit, length = recipe.length
    with ProgressDisplay(Console(stderr=True, quiet=quiet), recipe.name, length, unit, recipe.headline) as display:
        result = train(display)
    output(as_json, result.data, show, result, recipe.headline)
    raise Exit(result.exit_code)
