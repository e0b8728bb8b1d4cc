"""Refuses a cross-validation whose samples cannot be divided, before any fold is trained."""

from __future__ import annotations

import torch

from runner.plugin.context import Context, Slots
from runner.plugin.implementation import imported
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.training.recipe_errors import located


def refuse_indivisible(recipe: Recipe) -> None:
    """Raises a UsageError if the source of a fold's recipe cannot divide its samples.

    Only the data show whether every sample has a group, and how many samples there are. What is
    wrong with one fold is wrong with all of them.
    """
    # The source is only made, so that workers have nothing to do.
    data = recipe.data.model_copy(update={"workers": 0})
    context = Context(
        torch.device("cpu"),
        Slots(),
        recipe.seed,
        recipe.train.batch_size,
        recipe.optimizer,
        recipe.train.ema,
    )
    with generators.exclusive("the division into folds"), located(recipe):
        generators.seed(recipe.seed)
        imported(data)(data, context)
