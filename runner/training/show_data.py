"""Pictures of training data, before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.plugin.implementation import imported
from runner.plugin.registry import Registry
from runner.plugin.source import Source
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import UsageError
from runner.system.plots import NO_PLOTS, draw_png
from runner.training.pipeline import assemble

SIZE_INCHES = (9.0, 6.0)
"""Width and height of a figure, unless the source changes them."""


def show_data(recipe: Recipe, registry: Registry, path: Path) -> None:
    """Draws the training data of a recipe into a PNG file. Nothing is trained.

    Args:
        recipe: The recipe, whose stages and device are ignored.
        registry: The plugins.
        path: File to write.

    Raises:
        UsageError: The source has no picture, the data cannot be read, or the file cannot be
            written.
    """
    kind = recipe.data.kind
    if imported(recipe.data).show_data is Source.show_data:
        raise UsageError(
            f"data.kind: '{kind}' has no picture of its data: "
            "its source has no method show_data"
        )
    # The file is checked before the data are read, which may take minutes.
    if path.suffix != ".png":
        raise UsageError(f"--out: '{path.name}' should end in .png")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out: no such folder: {path.parent}")

    with generators.exclusive(f"the picture of '{kind}'"):
        generators.seed(recipe.seed)
        # Stages do not change which data there are, and some of them prepare for minutes.
        pipeline = assemble(replace(recipe, stages={}, device="cpu"), registry.files)
        picture = partial(pipeline.source.show_data, pipeline.learner)
        try:
            is_drawn = draw_png(picture, SIZE_INCHES, path.absolute())
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"--out: {path} cannot be written: {reason}") from error
    if not is_drawn:
        raise UsageError(f"--out: {NO_PLOTS}")
