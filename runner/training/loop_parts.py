"""Parts of a training loop that follow from its recipe alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from runner.training.adaptive_rates import AdaptiveRates
from runner.training.best_values import BestValues
from runner.training.guards import is_loss
from runner.training.metrics import Means
from runner.training.skipped_updates import SkippedUpdates
from runner.training.stopping import EarlyStop

if TYPE_CHECKING:
    from runner.plugin.progress import Progress
    from runner.plugin.source import State
    from runner.recipe.recipe import Recipe, TrainConfig
    from runner.training.callbacks import Callbacks
    from runner.training.guards import FiniteGuard
    from runner.training.pipeline import Assembly
    from runner.training.sentinel import Sentinel
    from runner.training.step import Step


class Part(Protocol):
    """A part of a loop with a state, which only some recipes have."""

    def state_dict(self) -> State:
        """Returns what a resumed training needs."""

    def load_state_dict(self, state: State) -> None:
        """Restores what ``state_dict`` returned."""


def existing(**parts: Part | None) -> dict[str, Part]:
    """Returns the parts that a recipe has, by name."""
    return {name: part for name, part in parts.items() if part is not None}


def count_skipped(skipped: SkippedUpdates | None) -> dict[str, float]:
    """Returns the metric of skipped updates; empty if the recipe skips none."""
    return {} if skipped is None else {"train/skipped_updates": float(skipped.count)}


def make_early_stop(recipe: Recipe) -> EarlyStop | None:
    """Returns the condition that ends a training before its length, if there is one."""
    stop = recipe.train.stop
    return None if stop is None else EarlyStop(stop, recipe.objective)


def make_best_values(recipe: Recipe) -> BestValues | None:
    """Returns the best values of metrics whose checkpoints stay, if there are any."""
    keep = recipe.train.keep
    return None if keep is None else BestValues(keep, recipe.objective)


def make_adaptive_rates(step: Step) -> AdaptiveRates | None:
    """Gives a step the rates of a schedule that reacts to evaluations; returns None for others."""
    recipe = step.pipeline.recipe
    if not recipe.lr_scheduler.reacts_to_evaluations:
        return None
    step.adaptive_rates = rates = AdaptiveRates(recipe)
    return rates


def observe_evaluation(
    parts: Mapping[str, Part], metrics: Mapping[str, float], progress: Progress
) -> None:
    """Shows the metrics of an evaluation to the parts that it changes."""
    for part in parts.values():
        if isinstance(part, EarlyStop | AdaptiveRates):
            part.observe(metrics, progress)


def make_callbacks(pipeline: Assembly) -> Callbacks | None:
    """Returns the callbacks of a recipe, if there are any."""
    if not pipeline.recipe.callbacks:
        return None
    # Few trainings need the module.
    from runner.training.callbacks import Callbacks

    return Callbacks(pipeline)


def make_means(pipeline: Assembly) -> Means:
    """Returns the sums of what the learner's updates return."""
    learner = pipeline.learner
    on_cpu = pipeline.device.type == "cpu"
    return Means(type(learner).__name__, on_cpu, partial(is_loss, learner))


def make_skipping(pipeline: Assembly, guard: FiniteGuard) -> SkippedUpdates | None:
    """Returns what skips updates with numbers that are not finite, if the recipe requires it."""
    if pipeline.recipe.train.on_nonfinite.action == "stop":
        return None
    return SkippedUpdates(pipeline, guard)


def make_sentinel(step: Step, pipeline: Assembly) -> Sentinel | None:
    """Returns the comparison of updates with the baseline, if the recipe requires it."""
    config = pipeline.recipe.train.sentinel
    if config is None:
        return None
    # Few trainings need the modules that compare updates.
    from runner.training.sentinel import Sentinel

    return Sentinel(step, pipeline, config)


def intervals_of(train: TrainConfig, progress: Progress) -> dict[str, int]:
    """Returns the intervals of reports, evaluations and checkpoints that the recipe has."""
    scale = progress.whole // progress.length
    counts = {
        "log": train.log_interval,
        "evaluate": train.evaluate_every,
        "checkpoint": train.checkpoint_every,
    }
    return {name: count * scale for name, count in counts.items() if count}
