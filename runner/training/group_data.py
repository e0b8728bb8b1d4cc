"""The data of a group of runs: all of them read the same, unless the data follow from the seed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from runner.plugin.fingerprint import is_same_data
from runner.plugin.generators import HostGeneratorStates
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import UsageError
from runner.training.pipeline import Assembly, assemble

_log = logging.getLogger(__name__)


class Group(NamedTuple):
    """A group of runs.

    Attributes:
        name: Name of the group.
        run_id: Its run in MLflow.
        data: Seed of another of its runs, and the fingerprint of the data that it has read; None
            if there is none.
    """

    name: str
    run_id: str | None
    data: tuple[int, str] | None = None


def refuse_other_data(
    group: Group | None,
    pipeline: Assembly,
    fingerprint: str | None,
    allow_drift: bool,
) -> None:
    """Raises a UsageError if other runs of the group have read other data, and that is not allowed.

    Args:
        group: The group; None for a run of its own.
        pipeline: The pipeline of the run.
        fingerprint: Fingerprint of the data of the run.
        allow_drift: Whether other data are only reported.
    """
    if group is None or group.data is None:
        return
    other_seed, locked = group.data
    if is_same_data(locked, fingerprint):
        return
    # Data may be drawn with the seed of the recipe.
    if other_seed != pipeline.recipe.seed:
        recipe = replace(pipeline.recipe, seed=other_seed)
        if is_same_data(locked, _fingerprint_of(recipe, pipeline.plugin_files)):
            return
    _log.warning("drift: the data are not those of the other runs of %s", group.name)
    if not allow_drift:
        raise UsageError(
            f"group {group.name} would not continue as it started: its data have changed; "
            "restore them, or accept that with --allow-drift"
        )


def _fingerprint_of(recipe: Recipe, plugin_files: Sequence[Path]) -> str | None:
    """Returns the fingerprint of the data that a run of the recipe would read now."""
    states = HostGeneratorStates()
    generators.seed(recipe.seed)
    try:
        return assemble(recipe, plugin_files).source.fingerprint()
    finally:
        states.restore()
