"""Recipes that several processes cannot train like one, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.system.errors import UsageError

if TYPE_CHECKING:
    from runner.plugin.configs import Setting, StageConfig
    from runner.recipe.recipe import Recipe


def refuse_recipe(recipe: Recipe, count: int) -> None:
    """Raises a UsageError if a recipe cannot be trained by that many processes."""
    problem = next(_problems(recipe, count), None)
    if problem is not None:
        raise UsageError(problem)


def _problems(recipe: Recipe, count: int) -> Iterator[str]:
    """Yields reasons against the training of a recipe by several processes."""
    data = recipe.data
    model = recipe.model
    train = recipe.train
    processes = f"{count} processes"
    if data.division is None:
        yield (
            f"data: '{data.kind}' does not declare how {processes} divide its batches: draw the part "
            f"of a process (context.process_part, context.process_generator) and set "
            f"{type(data).__name__}.division = 'draws', or use one process"
        )
    elif data.division == "rows" and data.depends_on_feedback:
        yield (
            f"data: batches of '{data.kind}' depend on the outputs of updates, and would differ "
            f"in {processes}; use one process"
        )
    reason = data.indivisible(count)
    if reason is not None:
        yield f"data.{reason}"
    if data.division == "draws" and model.draws():
        yield (
            f"model: updates of '{model.kind}' draw random numbers (dropout), and {processes} draw "
            f"parts of the batches of '{data.kind}' themselves; switch the dropout off, or use one "
            "process"
        )
    if model.couples_samples:
        yield (
            f"model: the loss of '{model.kind}' couples the samples of a batch, so {processes} "
            "would train another model; use one process"
        )
    # A process without samples would have no gradients to exchange.
    if train.batch_size < count:
        yield (
            f"train.batch_size: {train.batch_size} samples cannot be divided among {processes}; "
            "use a larger batch or fewer processes"
        )
    # With one sample everywhere, another dimension of size 1 cannot be told from the samples.
    elif train.batch_size == count and model.draws():
        yield (
            f"train.batch_size: {count} samples, one in each of {processes}, cannot be trained with "
            "random numbers in an update (dropout); use a larger batch, or switch the dropout off"
        )
    if train.sentinel is not None:
        yield "train.sentinel: updates of several processes are not compared; remove it"
    if train.memory_budget is not None:
        yield "train.memory_budget: the budget is for one process; remove it"
    if recipe.callbacks:
        kind = next(iter(recipe.callbacks))
        yield f"callbacks.{kind}: each process would call it; switch it off, or use one process"
    if train.on_nonfinite.action == "skip":
        yield "train.on_nonfinite: processes might skip different updates; use stop"
    # All processes have to end after the same update.
    if train.stop is not None and train.stop.seconds is not None:
        yield "train.stop.seconds: clocks of processes differ; use train.stop.reach or patience"


def refuse_stages(stages: Mapping[str, StageConfig], setting: Setting) -> None:
    """Raises a UsageError if an active stage is for one process.

    Args:
        stages: The active stages, by kind.
        setting: The context of the stages.
    """
    for kind, stage in stages.items():
        reason = reason_for_one_process(stage, setting)
        if reason is not None:
            raise UsageError(f"optimization.{kind}: {reason}; switch it off")


def reason_for_one_process(stage: StageConfig, setting: Setting) -> str | None:
    """Returns why a stage is for one process; None if several may use it."""
    reason = stage.one_process
    # What is selected before the training is selected once.
    if stage.tunes(setting) and not stage.prepares:
        reason = "it selects by measuring, and processes would select differently"
    elif setting.data.division == "draws" and stage.traces:
        reason = "its functions compute gradients, which processes add up inside of them"
    elif setting.model.draws() and stage.cuts_batches:
        reason = (
            f"'{setting.model.kind}' draws random numbers in an update (dropout), which would be "
            "others in parts of a batch"
        )
    elif setting.model.draws() and stage.traces:
        reason = (
            f"'{setting.model.kind}' draws random numbers in an update (dropout), and compiled "
            "code draws its own in each process"
        )
    return f"not with several processes: {reason}" if reason else None
