"""Settings of a smoke test: a training of a few updates that exercises every part of a run."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from runner.plugin.configs import DatasetConfig
from runner.plugin.progress import UNITS
from runner.recipe.loader import assignments

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe

UPDATES = 8
"""Length of a smoke test; the first checkpoint is in its middle, the second at its end."""
SHARE = 0.01
"""Share of the data, or of the size of an evaluation."""

SETTINGS = frozenset(
    [
        "data.limit",
        *(
            f"train.{name}"
            for name in (
                *UNITS,
                "checkpoint_every",
                "log_every",
                "evaluate_every",
                "stop",
                "smoke",
            )
        ),
    ]
)
"""What a smoke test sets in every recipe, whatever the command line says."""


def smoke_assignments(recipe: Recipe) -> list[str]:
    """Returns the assignments that make a smoke test of a recipe: a few updates, an evaluation at
    the end, two checkpoints, and a hundredth of the data.
    """
    unit = "updates"
    scale = 1
    if unit not in recipe.data.units:
        unit = "samples"
        scale = recipe.train.batch_size
    # A length in another unit is removed.
    values: dict[str, Any] = {
        f"train.{name}": None
        for name in UNITS
        if getattr(recipe.train, name) is not None
    }
    values |= {
        f"train.{unit}": UPDATES * scale,
        "train.checkpoint_every": UPDATES // 2 * scale,
        "train.log_every": UPDATES // 2 * scale,
        "train.evaluate_every": None,
        "train.stop": None,
        "train.smoke": True,
    }
    path = recipe.data.evaluation_size
    if isinstance(recipe.data, DatasetConfig):
        if recipe.data.divisible:
            values["data.limit"] = {"train": SHARE, "held_out": SHARE}
    elif path is not None:
        size: Any = reduce(getattr, path.split("."), recipe.data)
        values[f"data.{path}"] = max(1, int(SHARE * size))
    return assignments(values)
