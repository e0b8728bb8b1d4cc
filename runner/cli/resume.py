"""The command ``resume``: continues a run."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Option

from runner.cli.common import (
    AsJson,
    Bare,
    Plugins,
    Quiet,
    Run,
    Sets,
    load_lock,
    registry_of,
    run_and_settings,
    run_folders,
    say,
    settings,
)
from runner.cli.processes import first_decides, follow, start_processes
from runner.cli.timing import process_start
from runner.cli.training import AllowDrift, KeepBatch, Retune, Takeover, display_of, end, say_drift
from runner.distributed.membership import current
from runner.system.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from runner.tracking import RunFolder

_SHOWN_REASONS = 8


def resume(
    run: Run = "latest", bare: Bare = None, sets: Sets = None, allow_drift: AllowDrift = False,
    plugin: Plugins = None, takeover: Takeover = False, keep_batch: KeepBatch = False, retune: Retune = False,
    quiet: Quiet = False, as_json: AsJson = False,
    nproc: Annotated[
        int | None,
        Option("--nproc", min=1, help="Another number of processes on this machine than before, for datasets."),
    ] = None,
) -> NoReturn:  # fmt: skip
    """Continue a run that was killed, stopped or failed, from its newest undamaged checkpoint.

    On a CPU the result is bit for bit that of a run without the interruption. 'latest' is the
    newest run that can be resumed. A run of another machine that may still be training is refused
    without --takeover.

    [bold]runner resume[/]

    [bold]runner resume marl_phase2-3f2a91c0[/]

    [bold]runner resume shakespeare_gpt-3f2a91c0 --nproc 2[/]
    """
    from runner.recipe.lock import locked_processes
    from runner.system.text_lines import amount
    from runner.system.workspace_paths import LOCK_NAME
    from runner.tracking.locked_recipe import refuse_reached
    from runner.tracking.workspace import RunFolder, Workspace

    run, bare = run_and_settings(run, bare)
    # Only one of several processes looks at all runs and records those that have crashed.
    folder = RunFolder(Path(first_decides(partial(_selected, run, takeover, quiet))))
    lock = folder.path / LOCK_NAME
    registry = registry_of(plugin, quiet)
    command = f"runner resume {folder.name}"
    recipe, registry, changes = load_lock(lock, settings(sets, bare), registry, command, "--allow-drift")
    if current() is None:
        start_processes(recipe, nproc or locked_processes(lock))
    say_drift(changes)
    drifted = [str(change) for change in changes if change.matters]
    if drifted and not allow_drift:
        raise UsageError(
            f"run {folder.name} would not continue as it started: {len(drifted)} of the changes above matter; "
            "undo them, or accept them with --allow-drift"
        )
    refuse_reached(folder, recipe)
    done = folder.last_checkpoint or 0
    unit, _ = recipe.length

    follow(recipe, registry, folder)
    say(f"resuming {folder.name} at {amount(done, unit)}")
    options: Any = {"takeover": takeover, "allow_drift": allow_drift, "retune": retune, "started": process_start()}
    with display_of(recipe, quiet, keep_batch, done) as display:
        # The display has printed by then.
        from runner.training.run import run as train

        result = train(recipe, registry, Workspace(), display, folder, drifted, processes=current(), **options)
    end(result, recipe, as_json)


def _selected(run: str, takeover: bool, quiet: bool) -> str:
    """Returns the folder of the run that is resumed.

    Raises:
        UsageError: It cannot be resumed.
        CheckpointError: It has nothing from which it could be resumed.
    """
    from runner.system.workspace_paths import LOCK_NAME
    from runner.tracking.lookup import find
    from runner.tracking.workspace import Workspace

    all_folders = run_folders("resume", quiet)
    if "://" in run:
        from runner.tracking.run_copy import restore

        run = restore(run, Workspace()).name
    if run == "latest":
        return str(_newest_resumable(all_folders, Workspace().runs, takeover).path)
    folder = find(Workspace().runs, run)
    refusal = folder.refusal(takeover)
    if refusal:
        has_lock = (folder.path / LOCK_NAME).exists()
        error = UsageError if has_lock else CheckpointError
        raise error(refusal)
    return str(folder.path)


def _newest_resumable(folders: "Sequence[RunFolder]", runs: "Path", takeover: bool) -> "RunFolder":
    """Returns the newest run that can be resumed; a ``UsageError`` with the reasons if there is none."""
    for folder in folders:
        if not folder.obstacle(takeover):
            return folder
    reasons = "".join(f"\n    {folder.name}: {folder.resumable}" for folder in folders[:_SHOWN_REASONS])
    raise UsageError(f"no run in {runs} can be resumed{':' + reasons if reasons else ''}")
