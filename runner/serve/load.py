"""Loads a model by name for serving."""

from __future__ import annotations

from collections.abc import Sequence

from runner.plugin.registry import Registry
from runner.recipe.loader import load as read
from runner.recipe.recipe import Recipe
from runner.serve.model import ServedModel, served
from runner.training.inference_model import build
from runner.training.trained_run import trained


def load(model: str, recipe: str | None, settings: Sequence[str], registry: Registry) -> tuple[ServedModel, Recipe]:
    """Returns a model for serving, and the recipe with its settings.

    Args:
        model: A run or a version, in any form that ``trained`` accepts.
        recipe: A recipe whose sections ``inference`` and ``serve`` replace those of the run.
        settings: ``A.B.C=VALUE``, for either.
        registry: The plugins.

    Raises:
        RunnerError: There is no such model, its weights are damaged, or it cannot be served.
    """
    trained_model = trained(model, sets=() if recipe else settings, plugins=registry.files)
    if recipe:
        trained_model = trained_model.under(read(recipe, settings, trained_model.registry))
    resolved = trained_model.recipe
    about = {
        "recipe": resolved.name,
        "settings": resolved.model.model_dump(mode="json"),
        "stages": resolved.values()["inference"] if resolved.inference else {},
    }
    learner = build(trained_model).learner
    return served(trained_model.name, learner, resolved.model, about), resolved
