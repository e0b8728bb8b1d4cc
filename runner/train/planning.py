"""Memory of an update, predicted from the recipe alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from runner.memory.fake import fake_tensors
from runner.memory.kinds import Usage
from runner.memory.module_stack import ModuleStack
from runner.memory.outlined import outline_of_batch, outlined
from runner.memory.plan import MemoryPlan
from runner.memory.tracker import UpdateTracker
from runner.plugin.outline import SourceOutline
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.train.assemble import Assembly, assemble, resolve_device
from runner.train.step import Step

_MOST_UPDATES = 16
"""Updates that are planned of a learner whose roles take turns."""
_NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def plan_memory(recipe: Recipe, plugin_files: Sequence[Path] = (), outline: SourceOutline | None = None) -> MemoryPlan:
    """Predicts the memory of an update, without data and without a GPU.

    The pipeline is built and an update is computed with tensors that have no numbers. Stages that
    need a real device or real tensors are left out.

    Args:
        recipe: The recipe.
        plugin_files: Files that its plugins are from.
        outline: Shapes of the largest batch, if they are known.

    Raises:
        RunnerError: The recipe cannot be assembled.
    """
    started = time.perf_counter()
    device = _planned_device(recipe.device)
    planned = {kind: stage for kind, stage in recipe.stages.items() if not stage.unplanned}
    reduced = replace(recipe, stages=planned)
    with _preserved_generators():
        outline = outline or outline_of(reduced, plugin_files)
        is_real = False
        try:
            usage, active = _update(reduced, plugin_files, device, outline, is_fake=True)
        except _NEEDS_NUMBERS:
            if device.type != "cpu" and not torch.cuda.is_available():
                raise
            usage, active = _update(reduced, plugin_files, device, outline, is_fake=False)
            is_real = True
    unplanned = {kind: stage for kind, stage in recipe.stages.items() if kind not in planned}
    return MemoryPlan(
        recipe=recipe.name,
        device=device.type,
        batch_size=recipe.train.batch_size,
        usage=usage,
        largest=outline.largest,
        stages=active,
        left_out={kind: stage.unplanned for kind, stage in unplanned.items()},
        is_fused=any(stage.traces for stage in unplanned.values()),
        is_real=is_real,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restores the states of the global generators afterwards."""
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)


def outline_of(recipe: Recipe, plugin_files: Sequence[Path] = ()) -> SourceOutline:
    """Returns the largest batch of a recipe's source; builds the source if it declares none."""
    outline = recipe.data.outline(recipe.train.batch_size)
    if outline is not None:
        return outline
    pipeline = assemble(replace(recipe, stages={}, device="cpu"), plugin_files)
    drawn = Step(pipeline).next()
    return outline_of_batch(pipeline.source, drawn.batch)


def _planned_device(name: str) -> torch.device:
    """Returns the device that is planned for; it need not be there."""
    if name == "auto":
        return resolve_device(name)
    return torch.device("cuda:0" if name == "cuda" else name)


def _update(
    recipe: Recipe, plugin_files: Sequence[Path], device: torch.device, outline: SourceOutline,
    *, is_fake: bool,
) -> tuple[Usage, tuple[str, ...]]:  # fmt: skip
    """Computes updates under the tracker; returns the highest usage, and the active stages."""
    stack = ModuleStack()  # type: ignore[no-untyped-call]
    tracker = UpdateTracker(device, stack)
    batch_size = recipe.train.batch_size
    with fake_tensors() if is_fake else nullcontext(), tracker:
        build = outlined(outline)
        pipeline = Assembly(recipe, plugin_files, device, batch_size, None, build)
        optimizers = [optimizer for _, optimizer in pipeline.learner.optimizers()]
        modules = pipeline.learner.modules()
        stack.name_modules(modules)
        tracker.label_state(modules, optimizers)
        highest: tuple[int, Usage] = 0, {}
        for step in _steps(pipeline, optimizers):
            drawn = step.draw()
            assert drawn is not None
            tracker.label_batch(drawn.batch, drawn.noise)
            tracker.reset_peak()
            step(drawn)
            if tracker.peak > highest[0]:
                highest = tracker.peak, tracker.usage
    active = tuple(kind for kind, report in pipeline.reports.items() if report.active)
    return highest[1], active


def _steps(pipeline: Assembly, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Step]:
    """Yields the step for every update that has to be looked at."""
    step = Step(pipeline)
    if not _make_states(optimizers):
        drawn = step.draw()
        assert drawn is not None
        step(drawn)
        del drawn
    period = max(pipeline.learner.periods().values(), default=1)
    for fraction in pipeline.recipe.model.phases():
        _advance(pipeline, fraction)
        for _ in range(min(period, _MOST_UPDATES)):
            yield step


def _make_states(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Makes optimizers have the state that they have between two updates; whether that worked.

    Gradients stay, as they do between two updates.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except TypeError:  # one that needs a closure
            return False
    return True


def _advance(pipeline: Assembly, fraction: float) -> None:
    """Sets the progress of the training to a share of it."""
    progress: Any = pipeline.progress
    unit = "samples" if progress.unit == "epochs" else progress.unit
    setattr(progress, unit, int(fraction * progress.whole))
