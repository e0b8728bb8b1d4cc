"""From the name of a model to what is served."""

from __future__ import annotations

from collections.abc import Sequence

from runner.plugin.registry import Registry
from runner.recipe.loader import load as read
from runner.recipe.recipe import ServeConfig
from runner.serve.model import ServedModel, served
from runner.system.places import LOCK_NAME
from runner.tracking.locked import load_locked
from runner.tracking.workspace import folder_of
from runner.train.evaluate import load_model


def load(
    model: str, recipe: str | None, settings: Sequence[str], registry: Registry
) -> tuple[ServedModel, ServeConfig]:
    """A model as it is served, and how.

    Args:
        model: a run, as ``load_model`` understands it.
        recipe: one whose section ``serve`` is meant, instead of that of the run.
        settings: ``A.B.C=VALUE``, of either.
        registry: plugins.

    Raises:
        RunnerError: there is no such model, its weights are damaged, or it cannot be served.
    """
    folder = folder_of(model)
    own, registry = load_locked(folder.path / LOCK_NAME, folder.name, settings, registry, str)
    learner = load_model(folder.path, plugins=registry.files)
    about = {"recipe": own.name, "settings": own.model.model_dump(mode="json")}
    chosen = read(recipe, settings, registry) if recipe else own
    return served(folder.name, learner, own.model, about), chosen.serve
