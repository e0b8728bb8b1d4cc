"""Trials of batch sizes in child processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.child.group import ChildGroup
from runner.child.spawn import START_SECONDS, Cause, ChildError
from runner.plugin.stage import Probe
from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe


def try_batch_size(
    recipe: Recipe, plugin_files: Sequence[Path], batch_size: int, count: int
) -> Probe | None:
    """Trains a few steps with a batch size in as many child processes as a training has.

    Args:
        recipe: The recipe.
        plugin_files: Files of its plugins.
        batch_size: Samples of all processes together.
        count: Number of processes.

    Returns:
        The speed and memory; None if the memory does not suffice.

    Raises:
        UsageError: The trial failed for another reason.
    """
    largest = recipe.data.largest_batch()
    if largest is not None and batch_size > largest:
        return None
    # Stages that prepare would probe again.
    stages = {
        kind: stage for kind, stage in recipe.stages.items() if not stage.prepares
    }
    try:
        with ChildGroup(
            "runner.training.batch_size_probe",
            replace(recipe, stages=stages),
            count,
            plugin_files=plugin_files,
            options={"batch_size": batch_size},
        ) as group:
            return Probe(**group.answer(START_SECONDS))
    except ChildError as error:
        # The allocation failed in torch, or the kernel killed the process.
        if error.cause in (Cause.OUT_OF_MEMORY, Cause.CRASHED):
            return None
        message = f"a trial with batch size {batch_size} failed: {error}"
        raise UsageError(message) from error
