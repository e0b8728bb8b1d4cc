"""The recipe of a run, with the plugins that it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner.plugin.registry import Registry
from runner.recipe.loader import load
from runner.recipe.lock import plugins_again, read_lock
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.tracking.workspace import Workspace


def load_locked(
    lock: Path, name: str, sets: Sequence[str], registry: Registry, remedy: Callable[[Mapping[Path, str]], str]
) -> tuple[Recipe, Registry]:
    """The recipe of a lock, under these settings, and the plugins with its own.

    Plugin files of a run of this workspace are found again where they were, if they are as they were. Of any other lock
    they have to be named, because a lock from elsewhere must not run code.

    Raises:
        UsageError: they have to be named, or are not as they were; ``name`` is whose they are, and the remedy, given
            the files with why each is not taken by itself, says how they are named.
        RecipeError: the lock, or a setting, is wrong.
    """
    again = plugins_again(read_lock(lock), registry.files)
    is_own = lock.absolute().parent.parent == Workspace().runs
    if again and (not is_own or any(again.values())):
        names = ", ".join(path.name for path in again)
        why = "".join(f", and {path.name} {reason}" for path, reason in again.items() if reason and is_own)
        raise UsageError(f"{name} was trained with plugins of {names}{why}; {remedy(again)}")
    registry = Registry([*registry.files, *registry.classes, *again])
    return load(lock, sets, registry), registry
