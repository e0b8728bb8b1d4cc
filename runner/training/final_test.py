"""Tests the best checkpoint of a finished training on data that did not select it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runner.plugin.configs import DatasetConfig
from runner.recipe.recipe import Recipe
from runner.tracking import RunFolder
from runner.tracking.seeds import TEST
from runner.training.checkpoint_selection import load_chosen
from runner.training.evaluation import evaluated
from runner.training.pipeline import assemble

if TYPE_CHECKING:
    from runner.plugin.source import Source
    from runner.training.loop import Loop
    from runner.training.pipeline import Assembly

NOT_FINISHED = "the training is not finished"
SMOKE = "a smoke test measures no result"
NO_TEST_PART = "the data have no test part"
SELECTED = f"{NO_TEST_PART}; results are of the data that selected the best checkpoint"


def untested(recipe: Recipe, source: Source, *, is_complete: bool) -> str | None:
    """Returns why a training has no test metrics; None if it has some."""
    if not is_complete:
        return NOT_FINISHED
    if recipe.train.smoke:
        return SMOKE
    if source.has_test():
        return None
    # A single evaluation selects nothing.
    if recipe.objective is None or recipe.train.evaluate_every is None:
        return NO_TEST_PART
    can_set_aside = isinstance(recipe.data, DatasetConfig) and recipe.data.divisible
    return (
        f"{SELECTED}; data.test=0.5 sets half of them aside"
        if can_set_aside
        else SELECTED
    )


def test_best(loop: Loop, run_dir: Path) -> dict[str, float]:
    """Returns the test metrics of the best checkpoint, or of the last one without an objective.

    Only one of several processes may call it. The learner has the parameters of that checkpoint
    afterwards, unless processes have parts of them: then another one is evaluated.

    Args:
        loop: A training that is complete, and whose checkpoints are written.
        run_dir: Folder of the run.

    Raises:
        CheckpointError: No checkpoint can be used.
        RunnerError: The evaluation failed.
    """
    alone = _alone(loop.pipeline)
    with loop.display.phase("evaluating the test part"), alone as pipeline:
        _, state = load_chosen(RunFolder(run_dir), "best", is_training=True)
        pipeline.load_learnt(state["pipeline"])
        metrics = evaluated(pipeline, "test")
    return {f"{TEST}{name}": value for name, value in metrics.items()}


@contextmanager
def _alone(pipeline: Assembly) -> Iterator[Assembly]:
    """Yields a pipeline that evaluates without other processes, and restores the progress
    afterwards.
    """
    if pipeline.learner.sharding is not None:
        yield assemble(pipeline.recipe, pipeline.plugin_files)
        return
    context = pipeline.context
    processes = context.processes
    progress = pipeline.progress.state_dict()
    # The other processes have ended, or wait for nothing.
    context.processes = None
    try:
        yield pipeline
    finally:
        context.processes = processes
        pipeline.progress.load_state_dict(progress)
