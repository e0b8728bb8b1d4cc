"""Selection of one of a run's checkpoints: the best or the last."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from runner.plugin.source import State
from runner.recipe.recipe import Recipe
from runner.system.errors import CheckpointError, DamagedError
from runner.system.manifest import Manifest
from runner.tracking import RunFolder
from runner.training import checkpoint as saved
from runner.training.checkpoint_files import MANIFEST, read_manifest
from runner.training.state_schema import check_state

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
    """Unit of the recipe's length."""
    metric: str
    """Of the objective, ``eval/<name>``."""
    value: float


def best_of(checkpoints: Path, recipe: Recipe) -> Best | None:
    """Returns the best checkpoint in a folder of checkpoints; None without an objective, or before
    it was measured.
    """
    path, objective = saved.best(saved.checkpoints(checkpoints)), recipe.objective
    if objective is None or path is None:
        return None
    manifest, (unit, _) = read_manifest(path), recipe.length
    return Best(
        str(path),
        manifest["done"],
        unit,
        f"eval/{objective.name}",
        manifest["score"] * objective.sign,
    )


def load_chosen(
    folder: RunFolder, which: Which, *, is_training: bool = False
) -> tuple[Path, State]:
    """Reads a run's checkpoint with the best objective, or its last one, and reports its path.

    If there is no best one, or the selected one is damaged, it is the newest undamaged one.
    ``is_training`` requires more than the model, as described at ``check_state``.

    Raises:
        CheckpointError: there is none that can be used.
    """
    found = saved.checkpoints(folder.checkpoints)
    best = saved.best(found) if which == "best" else None
    damages: list[DamagedError] = []
    for path in dict.fromkeys([*([best] if best else []), *found[::-1]]):
        try:
            _check_named(folder.path, path)
            state = saved.load(path)
            check_state(state, path, is_training=is_training)
        except DamagedError as error:
            damages.append(error)
            continue
        for damage in damages:
            _log.warning("%s; %s is used instead", damage, path.name)
        return path, state
    reason = f": {damages[0]}" if damages else ""
    raise CheckpointError(
        f"run {folder.name} has no checkpoint that can be used{reason}"
    )


def _check_named(folder: Path, checkpoint: Path) -> None:
    """Compares a checkpoint of a model's folder with the folder's manifest, which names all of its files.

    That of a run names no checkpoints, because they come and go.
    """
    manifest = Manifest(folder)
    if any(name.startswith(f"{saved.CHECKPOINTS}/") for name in manifest.entries()):
        manifest.check(checkpoint / MANIFEST)


def load_resumed(checkpoints: Path) -> State | None:
    """Reads the checkpoint from which a training is resumed; None if none has been written yet.

    Raises:
        CheckpointError: as ``load_newest``.
    """
    return saved.load_newest(checkpoints, partial(check_state, is_training=True))
