"""The recipe of a run, with the plugins that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import Drift, changed_sources, drift, is_trusted, plugins_again, read_lock
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.system.trust import is_own
from runner.tracking.workspace import RunFolder, Workspace


def load_locked(
    lock: Path,
    name: str,
    sets: Sequence[str],
    registry: Registry,
    remedy: Callable[[Mapping[Path, str]], str],
) -> tuple[Recipe, Registry, list[Drift]]:
    """Loads the recipe of a lock with these settings, and the plugins, including those of the lock.

    Plugin files that are not named on the command line are used only if this
    user's runner wrote the lock, into this workspace and on this machine, and if
    they and their imports from the same folders are unchanged. Files that are
    named run in any case, so that the caller reports the changes.

    Args:
        lock: The file.
        name: What the lock belongs to, for messages.
        sets: Assignments over the recipe.
        registry: The plugins that are named.
        remedy: Returns how to name plugin files, given the files with why each is not used.

    Returns:
        The recipe, all plugins, and the changes since the lock was written.

    Raises:
        UsageError: Plugin files have to be named.
        RecipeError: The lock, or a setting, is wrong.
    """
    locked = read_lock(lock)
    plugin_files = plugins_again(locked, registry.files)
    if plugin_files:
        # Code from a lock runs without a question, so that the lock must be trustworthy.
        distrust = _distrust(lock)
        changes = {} if distrust else changed_sources(locked, plugin_files)
        problem = distrust or " and ".join(f"{path.name} {reason}" for path, reason in changes.items())
        if problem:
            names = ", ".join(path.name for path in plugin_files)
            refusal = f"which does not run unless you name it with --plugin, because {problem}"
            hint = remedy(dict.fromkeys(plugin_files, "" if distrust else problem))
            raise UsageError(f"{name} was trained with the plugin file {names}, {refusal}; {hint}")
    registry = Registry([*registry.files, *registry.classes, *plugin_files])
    recipe = load(lock, sets, registry)
    return recipe, registry, drift(lock, recipe, registry)


def refuse_reached(folder: RunFolder, recipe: Recipe) -> None:
    """Raises a UsageError if a run has reached its new length already: it would train nothing."""
    record = folder.record()
    done = folder.last_checkpoint or 0
    unit, goal = recipe.length
    if record is not None and record.unit == unit and record.goal != goal <= done:
        raise UsageError(f"train.{unit}: run {folder.name} has already reached {done:,}, which is beyond {goal:,}")


def _distrust(lock: Path) -> str:
    """Returns why a lock is not taken for one that this user's runner wrote here; empty if it is."""
    folder = lock.absolute().parent
    workspace = Workspace()
    if folder.parent != workspace.runs:
        return f"{lock.name} is not that of a run in {workspace.runs}"
    if not all(map(is_own, (lock, folder, workspace.runs, workspace.root))):
        return "the run belongs to another user"
    if not is_trusted(lock):
        origin = "it was moved or copied, or is from someone else or from an older runner"
        return f"your runner did not write its lock here: {origin}"
    return ""
