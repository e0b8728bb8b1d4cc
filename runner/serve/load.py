"""Loads a model by name for serving."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runner.plugin.learner import Learner
from runner.plugin.registry import Registry
from runner.recipe.loader import load as read
from runner.recipe.recipe import Recipe
from runner.serve.model import ServedModel, served
from runner.training.inference_model import build
from runner.training.trained_run import trained

_log = logging.getLogger(__name__)


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
        "changes": trained_model.changes,
    }
    models = [build(trained_model) for _ in range(resolved.serve.parallel)]
    about["inactive"] = inactive = {
        report.kind: report.reason for report in models[0].pipeline.reports.values() if not report.active
    }
    for kind, reason in inactive.items():
        _log.warning("inference.%s is inactive: %s", kind, reason)
    stages = [pair for model in models for pair in model.pipeline.stages.items()]
    first, *copies = [model.learner for model in models]
    for copy in copies:
        _share_parameters(first, copy)
    # Labels are numbers of these names.
    about["classes"] = list(first.context.classes)
    return served(trained_model.name, first, resolved.model, about, copies, stages), resolved


def _share_parameters(learner: Learner, copy: Learner) -> None:
    """Frees the parameters of a copy that the learner has, too; buffers may change in predictions, and stay."""
    for name, role in copy.roles.items():
        shared = dict(learner.roles[name].module.named_parameters())
        for key, parameter in role.module.named_parameters():
            parameter.data = shared[key].data
