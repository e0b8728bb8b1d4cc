"""Description of data that a training leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.plugin.configs import DatasetConfig

if TYPE_CHECKING:
    from runner.recipe.recipe import Recipe


def describe_limits(recipe: Recipe) -> str | None:
    """Returns which part of the data is used, as ``data.limit`` and ``train.overfit_batches`` set
    it; None if all of them are.
    """
    parts = []
    limit = recipe.data.limit if isinstance(recipe.data, DatasetConfig) else None
    if limit is not None:
        if limit.train < 1:
            parts.append(f"{_percent(limit.train)} of the training data")
        if limit.held_out < 1:
            parts.append(f"{_percent(limit.held_out)} of the held-out data")
    count = recipe.train.overfit_batches
    if count is not None:
        batches = "batch" if count == 1 else f"{count} batches"
        parts.append(f"the same {batches} in all updates")
    return ", ".join(parts) or None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
