"""Which of a run's checkpoints is meant."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runner.plugin.source import State
from runner.recipe.recipe import Recipe
from runner.system.errors import CheckpointError
from runner.tracking import RunFolder
from runner.train import checkpoint as saved

Which = Literal["best", "last"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The best checkpoint that a run has kept."""

    checkpoint: str
    """Its folder."""
    step: int
    """How far the training was, in ``unit``."""
    unit: str
    """What the recipe counts."""
    metric: str
    """Of the objective, ``eval/<name>``."""
    value: float


def best_of(checkpoints: Path, recipe: Recipe) -> Best | None:
    """The best checkpoint in a run's folder of them; None if there is no objective, or it was not measured yet."""
    path, objective = saved.best(saved.checkpoints(checkpoints)), recipe.objective
    if objective is None or path is None:
        return None
    manifest, (unit, _) = saved.read_manifest(path), recipe.length
    return Best(str(path), manifest["done"], unit, f"eval/{objective.name}", manifest["score"] * objective.sign)


def load_chosen(folder: RunFolder, which: Which) -> tuple[Path, State]:
    """Reads a run's checkpoint with the best objective, or its last one, and says where it is.

    Where there is no best one, or the one that is meant is damaged, it is the newest that is whole.

    Raises:
        CheckpointError: there is none that can be used.
    """
    found = saved.checkpoints(folder.checkpoints)
    best = saved.best(found) if which == "best" else None
    for path in ([best] if best else []) + found[::-1]:
        try:
            return path, saved.load(path)
        except saved.DamagedError as error:
            _log.warning("%s; another checkpoint is used, if there is one", error)
    raise CheckpointError(f"run {folder.name} has no checkpoint that can be used")
