"""Evaluates a learner on held-out data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.distributed.division import decide_together
from runner.plugin.context import derived_seed
from runner.plugin.generators import seeded
from runner.plugin.metric_names import check_metric_name
from runner.plugin.watched_metric import missing_metric
from runner.recipe.yaml_nodes import DEFAULT
from runner.system.errors import RunnerError
from runner.training.recipe_errors import recipe_error

if TYPE_CHECKING:
    from runner.plugin.source import Batch
    from runner.recipe.recipe import Recipe
    from runner.training.pipeline import Assembly


Part = Literal["validation", "test"]
"""Validation: what a training evaluates and selects its best checkpoint by. Test: what no
evaluation of a training reads.
"""


def evaluated(pipeline: Assembly, part: Part = "validation") -> dict[str, float]:
    """Evaluates the learner in evaluation mode, with the same random numbers every time.

    Args:
        pipeline: The pipeline.
        part: The part of the data; the test part only where the source has one.

    Raises:
        RunnerError: The evaluation returns no numbers by name, or the declared objective is
            missing.
    """
    group = pipeline.context.processes
    if group is not None and pipeline.draws_parts:
        # Such a source measures a model as a whole, so one process does it for all.
        return decide_together(group, lambda: _measured(pipeline, part))
    return _measured(pipeline, part)


def _measured(pipeline: Assembly, part: Part) -> dict[str, float]:
    """Evaluates the learner in this process."""
    # Evaluations with the same random numbers can be compared.
    seed = derived_seed(pipeline.context.seed, "evaluation")
    with ExitStack() as stack:
        if part == "test":
            stack.enter_context(pipeline.source.testing())
        stack.enter_context(seeded(seed, pipeline.device))
        stack.enter_context(pipeline.learner.evaluating())
        metrics = pipeline.source.evaluate(pipeline.learner)
    return checked(metrics, pipeline)


def draw_evaluation(pipeline: Assembly, interval: int) -> None:
    """Draws what was evaluated, if the recipe wants a picture of this evaluation.

    Args:
        pipeline: The training's pipeline.
        interval: Between two evaluations, counted as ``Progress.position``.
    """
    every = pipeline.recipe.tracking.render_every
    media = pipeline.context.media
    if every is None or media is None:
        return
    if pipeline.progress.position // interval % every:
        return
    ending = pipeline.recipe.data.pictures[0]
    media.write("evaluation", ending, partial(draw, pipeline))


def draw(pipeline: Assembly, path: Path) -> None:
    """Draws what an evaluation measures, in evaluation mode and with its random numbers."""
    seed = derived_seed(pipeline.context.seed, "evaluation")
    with seeded(seed, pipeline.device), pipeline.learner.evaluating():
        pipeline.source.render(pipeline.learner, path)


def rehearse_evaluation(pipeline: Assembly, batch: Batch) -> None:
    """Evaluates a little after the first update, to report mistakes immediately.

    Raises:
        RecipeError: Nothing has read some values of the recipe by then.
        RunnerError: The evaluation fails, or a metric is refused.
    """
    metrics = pipeline.source.rehearse(pipeline.learner, batch)
    # An evaluation may read values, too.
    pipeline.refuse_unread()
    if metrics is not None:
        checked(metrics, pipeline)


def checked(metrics: Any, pipeline: Assembly) -> dict[str, float]:
    """Returns the metrics of an evaluation.

    Raises:
        RunnerError: The metrics are not numbers by name, or the declared objective is missing.
        RecipeError: A metric that the recipe compares is missing.
    """
    objective = pipeline.recipe.declared_objective
    method = f"{type(pipeline.source).__name__}.evaluate"
    has_numbers = isinstance(metrics, dict) and all(
        isinstance(value, int | float) for value in metrics.values()
    )
    if not has_numbers:
        raise RunnerError(
            f"{method} should return numbers by name, got {metrics!r:.200}"
        )
    for name in metrics:
        check_metric_name(name, method)
    _refuse_missing(pipeline.recipe, set(metrics))
    # The objective decides which checkpoint is the best.
    if objective and objective.name not in metrics:
        names = ", ".join(metrics) or "there are none"
        raise RunnerError(
            f"the objective is '{objective.name}', which is not among the metrics of "
            f"{method}: {names}"
        )
    return {name: float(value) for name, value in metrics.items()}


def _refuse_missing(recipe: Recipe, names: set[str]) -> None:
    """Raises a RecipeError about a metric that the recipe compares and no evaluation has."""
    for setting, name in _compared(recipe):
        if name not in names:
            raise recipe_error(recipe, setting, missing_metric(name, names))


def _compared(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields settings that name a metric of evaluations, with the metric without ``eval/``."""
    stop = recipe.train.stop
    if stop is not None and stop.metric is not None:
        yield "train.stop.metric", stop.metric.removeprefix("eval/")
    if recipe.train.keep is not None:
        for metric in recipe.train.keep.metrics:
            yield f"train.keep.metrics.{metric}", metric.removeprefix("eval/")
    watched = recipe.lr_scheduler.watched(recipe.objective)
    # The default objective of a model need not be measured by its source.
    if watched is not None:
        origin = recipe.origins.get("lr_scheduler.metric", DEFAULT)
        key = "kind" if origin == DEFAULT else "metric"
        yield f"lr_scheduler.{key}", watched[0]
