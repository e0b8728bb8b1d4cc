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
    """The best checkpoint of a run.

    Attributes:
        checkpoint: Its folder.
        step: Progress of the training, in ``unit``.
        unit: Unit of the recipe's length.
        metric: Name of the objective, ``eval/<name>``.
        value: Value of the objective.
    """

    checkpoint: str
    step: int
    unit: str
    metric: str
    value: float


def best_of(checkpoints: Path, recipe: Recipe) -> Best | None:
    """Returns the best checkpoint in a folder; None if no objective was measured."""
    path = saved.best(saved.checkpoints(checkpoints))
    objective = recipe.objective
    if objective is None or path is None:
        return None
    manifest = read_manifest(path)
    # The step of a manifest is in samples if the unit is epochs.
    return Best(
        checkpoint=str(path),
        step=manifest["done"],
        unit=recipe.length[0],
        metric=f"eval/{objective.name}",
        value=manifest["score"] * objective.sign,
    )


def load_chosen(
    folder: RunFolder, which: Which, *, is_training: bool = False
) -> tuple[Path, State]:
    """Reads a run's checkpoint with the best objective, or its last one, and reports its path.

    Without a best checkpoint, or if the selected one is damaged, it is the newest undamaged one.
    ``is_training`` requires more than the model, as described at ``check_state``.

    Raises:
        CheckpointError: None can be used.
    """
    paths = saved.checkpoints(folder.checkpoints)
    candidates = paths[::-1]
    best = saved.best(paths) if which == "best" else None
    if best is not None:
        candidates.insert(0, best)
    damages: list[DamagedError] = []
    # The best checkpoint may also be the newest.
    for path in dict.fromkeys(candidates):
        try:
            _check_named(folder.path, path)
            state = saved.load(path)
            check_state(state, path, is_training=is_training)
        except DamagedError as error:
            damages.append(error)
            continue
        # Damage is reported when it is known which checkpoint is used instead.
        for damage in damages:
            _log.warning("%s; %s is used instead", damage, path.name)
        return path, state
    reason = f": {damages[0]}" if damages else ""
    raise CheckpointError(
        f"run {folder.name} has no checkpoint that can be used{reason}"
    )


def _check_named(folder: Path, checkpoint: Path) -> None:
    """Compares a checkpoint of a model's folder with the folder's manifest.

    The manifest of a run names no checkpoints, because these are replaced.
    """
    manifest = Manifest(folder)
    if any(name.startswith(f"{saved.CHECKPOINTS}/") for name in manifest.entries()):
        manifest.check(checkpoint / MANIFEST)


def load_resumed(checkpoints: Path) -> State | None:
    """Reads the checkpoint from which a training is resumed; None if none has been written yet.

    Raises:
        CheckpointError: As ``load_newest``.
    """
    return saved.load_newest(checkpoints, partial(check_state, is_training=True))
