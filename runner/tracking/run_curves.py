"""Plot of the evaluations of one run."""

from __future__ import annotations

import logging
from pathlib import Path

from runner.recipe.recipe import Recipe
from runner.tracking.seeds import PICTURE, bounds_of, draw, evaluations
from runner.tracking.workspace import RunFolder

CURVES = f"{PICTURE}.png"
"""The file with the plot, in the folder of a run."""
_log = logging.getLogger(__name__)


def draw_run(folder: RunFolder, recipe: Recipe) -> list[Path]:
    """Draws the metrics of a run over its evaluations.

    Args:
        folder: The folder of the run, in which the plot is written.
        recipe: The run's recipe, whose primary metrics come first.

    Returns:
        The file; none for fewer than two evaluations, without matplotlib, or if it cannot be written.
    """
    curves = evaluations({recipe.seed: folder})
    steps = {step for by_seed in curves.values() for values in by_seed.values() for step in values}
    if len(steps) < 2:
        return []
    unit, _ = recipe.length
    try:
        return draw(
            curves,
            recipe.headline,
            unit,
            folder.path,
            bounds_of(recipe),
            label="evaluation",
        )
    except OSError as error:
        # A plot is not worth a training.
        _log.warning("%s: the evaluations could not be drawn: %s", folder.path, error.strerror or error)
        return []
