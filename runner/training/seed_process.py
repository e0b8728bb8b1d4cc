"""Trains one run of a group in a child process, which reports its progress to the parent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.child.protocol import Parent
from runner.child.spawn import Child, Limits
from runner.plugin.registry import Registry
from runner.recipe.joined_results import data_key
from runner.recipe.lock import DATA, drift, read_lock
from runner.recipe.recipe import Recipe
from runner.system.errors import UsageError
from runner.system.workspace_paths import LOCK_NAME
from runner.tracking import RunFolder, Workspace
from runner.training.group_data import Group
from runner.training.outputs import NoOutput
from runner.training.signals import Stop

# After SIGTERM, a child writes a checkpoint.
_GRACE_SECONDS = 60.0
_REPORT_SECONDS = 0.5


def train_seed(
    recipe: Recipe,
    registry: Registry,
    folder: RunFolder | None,
    threads: int | None,
    options: Mapping[str, Any],
    stop: Stop,
    advance: Callable[[int, dict[str, float]], None],
) -> None:
    """Trains one seed in a child process, which is stopped together with this one.

    Args:
        recipe: The recipe with the seed.
        registry: Contains its plugins.
        folder: The run to continue, if there is one.
        threads: Number of threads; None for the recipe's.
        options: Workspace, group, tags, note and data of the run, and whether it may drift.
        stop: Stops the training.
        advance: Receives the progress.

    Raises:
        ChildError: The training failed.
    """
    path = None
    # This process owns the group now, and all runs that the former owner had started.
    if folder is not None and not folder.obstacle(takeover=True):
        path = str(folder.path)
    with Child(
        __name__,
        recipe,
        plugin_files=registry.files,
        options={**options, "folder": path},
        limits=Limits(grace=_GRACE_SECONDS),
        threads=threads,
    ) as child:
        while (message := child.receive(stop.__bool__)) is not None:
            advance(message["step"], message["metrics"])


def locked_data(
    runs: Mapping[int, RunFolder], recipes: Mapping[int, Recipe], seed: int
) -> tuple[int, str] | None:
    """Returns the seed of another run of a group, and the fingerprint of the data that it has read;
    None without one.

    Args:
        runs: The runs that have started, by seed.
        recipes: The recipes by seed.
        seed: The seed whose run needs the same data.
    """
    key = data_key(recipes[seed])
    for other_seed, folder in runs.items():
        lock = folder.path / LOCK_NAME
        # A run that is about to start has no lock yet.
        if (
            other_seed == seed
            or not lock.exists()
            or data_key(recipes[other_seed]) != key
        ):
            continue
        fingerprint = (read_lock(lock).get(DATA) or {}).get("fingerprint")
        return None if fingerprint is None else (recipes[other_seed].seed, fingerprint)
    return None


class _Reporting(NoOutput):
    """Sends the progress of the training to the parent."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._reported = 0.0

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Sends the progress, at most twice a second."""
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            self._parent.tell(step=step, metrics=metrics)


def main(parent: Parent) -> None:
    """Trains one seed of the group, from its newest checkpoint if there is one."""
    # The parent, which imports this module, too, does not train.
    from runner.training.run import run

    recipe, registry = parent.load()
    options = parent.options
    folder = RunFolder(Path(options["folder"])) if options["folder"] else None
    allow_drift = options["allow_drift"]
    changes: list[str] = []
    if folder is not None:
        # A changed plugin or library would continue another training.
        differences = drift(folder.path / LOCK_NAME, recipe, registry)
        changes = [str(change) for change in differences if change.matters]
        if changes and not allow_drift:
            message = f"run {folder.name} would not continue as it started"
            raise UsageError(f"{message}: {'; '.join(changes)}")
    name, run_id = options["group"]
    data = options["data"]
    group = Group(name, run_id, None if data is None else tuple(data))
    result = run(
        recipe,
        registry,
        Workspace(options["workspace"]),
        _Reporting(parent),
        folder,
        changes,
        own_tags=options["tags"],
        note=options["note"],
        parent=group,
        takeover=True,
        allow_drift=allow_drift,
    )
    sys.exit(result.exit_code)
