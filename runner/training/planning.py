"""Memory of an update, predicted from the recipe alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from runner.memory.fake import fake_tensors
from runner.memory.kinds import Kind, Usage
from runner.memory.module_stack import ModuleStack
from runner.memory.outlined import outline_of_batch, outlined
from runner.memory.plan import MemoryPlan
from runner.memory.tracker import UpdateTracker
from runner.plugin.configs import Setting, StageConfig
from runner.plugin.outline import SourceOutline
from runner.recipe.recipe import Recipe
from runner.system import generators
from runner.system.errors import RunnerError, UsageError
from runner.training.pipeline import Assembly, assemble, resolve_device, setting_of
from runner.training.step import Step

# A learner whose roles alternate has a period of several updates; longer ones are cut off.
_MOST_UPDATES = 16
# Some operators have results whose shape depends on numbers.
_NEEDS_NUMBERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def plan_memory(
    recipe: Recipe,
    plugin_files: Sequence[Path] = (),
    outline: SourceOutline | None = None,
    *,
    compiled: bool = False,
) -> MemoryPlan:
    """Predicts the memory of an update, without data and without a GPU.

    The pipeline is built and an update is computed with tensors that have no numbers. Stages that
    need a real device or real tensors are left out.

    Args:
        recipe: The recipe.
        plugin_files: Files of its plugins.
        outline: Shapes of the largest batch; by default those of the recipe's source.
        compiled: Plan the code that the recipe's compiler generates, which takes several times as
            long.

    Raises:
        RunnerError: The recipe cannot be assembled, or its compiled update cannot be planned.
    """
    started = time.perf_counter()
    # A plan may be for a GPU that this machine does not have.
    device = _planned_device(recipe.device)
    if compiled:
        _check_compilers(recipe, device)
    # Tensors without numbers can be on a GPU only where torch finds one.
    tracked_device = device if torch.cuda.is_available() else torch.device("cpu")
    planned = {
        kind: stage
        for kind, stage in recipe.stages.items()
        if not stage.unplanned or (compiled and stage.traces)
    }
    context = setting_of(recipe, device)
    reduced = replace(recipe, stages=planned)
    batch_size = recipe.train.batch_size
    if outline is None:
        for stage in planned.values():
            batch_size = stage.planned_batch_size(context, batch_size)
        train = recipe.train.model_copy(update={"batch_size": batch_size})
        reduced = replace(reduced, train=train)
    with _preserved_generators():
        outline = outline or outline_of(reduced, plugin_files)
        tracked = _tracked_update(
            reduced, plugin_files, tracked_device, outline, compiled=compiled
        )
    ratio = recipe.train.batch_size / batch_size
    usage = {
        (kind, holder): round(size * ratio) if kind is Kind.batch else size
        for (kind, holder), size in tracked.usage.items()
    }
    unplanned = {
        kind: stage
        for kind, stage in recipe.stages.items()
        if kind not in planned and not _is_inactive(stage, context)
    }
    return MemoryPlan(
        recipe=recipe.name,
        device=device.type,
        kernels=tracked_device.type,
        batch_size=recipe.train.batch_size,
        usage=usage,
        largest=outline.largest,
        stages=tracked.stages,
        left_out={kind: stage.unplanned for kind, stage in unplanned.items()},
        is_estimate=any(stage.traces for stage in unplanned.values()),
        is_real=tracked.is_real,
        seconds=time.perf_counter() - started,
    )


def _check_compilers(recipe: Recipe, device: torch.device) -> None:
    """Raises if the code that the recipe's compiler generates cannot be planned."""
    if device.type != "cpu":
        raise UsageError(f"--compiled plans for a CPU only, not for {device.type}")
    context = setting_of(recipe, device)
    compilers = [
        stage
        for stage in recipe.stages.values()
        if stage.traces and not _is_inactive(stage, context)
    ]
    if not compilers:
        raise UsageError(
            f"{recipe.name}: no stage compiles anything on a CPU; "
            "plan it without --compiled"
        )
    for stage in compilers:
        # A measurement needs tensors with numbers.
        if stage.tunes(context):
            raise UsageError(
                f"{stage.kind} measures which code it generates; "
                "plan it without --compiled"
            )


def _is_inactive(stage: StageConfig, context: Setting) -> bool:
    """Returns whether a stage has nothing to do on the planned device."""
    try:
        return stage.inactive(context) is not None
    except UsageError:
        return False


class _TrackedUpdate(NamedTuple):
    """Memory of an update at its highest point.

    Attributes:
        usage: Bytes by kind and module.
        stages: Active stages.
        is_real: Whether its tensors had numbers.
    """

    usage: Usage
    stages: tuple[str, ...]
    is_real: bool


def _tracked_update(
    recipe: Recipe,
    plugin_files: Sequence[Path],
    device: torch.device,
    outline: SourceOutline,
    *,
    compiled: bool,
) -> _TrackedUpdate:
    """Computes updates with fake tensors if that is possible, or else with real ones."""
    if compiled:
        usage, stages = _compiled_update(recipe, plugin_files, device, outline)
        return _TrackedUpdate(usage, stages, is_real=False)
    try:
        usage, stages = _update(recipe, plugin_files, device, outline, is_fake=True)
    except _NEEDS_NUMBERS:
        usage, stages = _update(recipe, plugin_files, device, outline, is_fake=False)
        return _TrackedUpdate(usage, stages, is_real=True)
    return _TrackedUpdate(usage, stages, is_real=False)


@contextmanager
def _preserved_generators() -> Iterator[None]:
    """Restores the states of the global generators afterwards."""
    states = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(states)


def outline_of(recipe: Recipe, plugin_files: Sequence[Path] = ()) -> SourceOutline:
    """Returns the largest batch of a recipe's source; builds the source if it declares none."""
    outline = recipe.data.outline(recipe.train.batch_size)
    if outline is not None:
        return outline
    pipeline = assemble(replace(recipe, stages={}, device="cpu"), plugin_files)
    inputs = Step(pipeline).next()
    return outline_of_batch(pipeline.source, inputs.batch)


def _planned_device(name: str) -> torch.device:
    """Returns the device of the plan, which this machine may not have."""
    if name == "auto":
        return resolve_device(name)
    return torch.device("cuda:0" if name == "cuda" else name)


def _update(
    recipe: Recipe,
    plugin_files: Sequence[Path],
    device: torch.device,
    outline: SourceOutline,
    *,
    is_fake: bool,
) -> tuple[Usage, tuple[str, ...]]:
    """Computes updates under the tracker; returns the highest usage, and the active stages."""
    if is_fake:
        outline = replace(outline, example=None)
    stack = ModuleStack()  # type: ignore[no-untyped-call]
    tracker = UpdateTracker(device, stack)
    with fake_tensors() if is_fake else nullcontext(), tracker:
        pipeline = _labelled_pipeline(
            recipe, plugin_files, device, tracker, stack, outline
        )
        usage = _highest_usage(pipeline, tracker)
    return usage, _active_stages(pipeline)


def _compiled_update(
    recipe: Recipe,
    plugin_files: Sequence[Path],
    device: torch.device,
    outline: SourceOutline,
) -> tuple[Usage, tuple[str, ...]]:
    """Computes compiled updates under the tracker; returns the same as ``_update``.

    Raises:
        RunnerError: Torch cannot compile the update without numbers.
    """
    from torch._dynamo.exc import TorchDynamoException

    # Importing torch's compiler takes as long as a plan without it.
    from runner.memory.compiled import CompiledStack, CompiledTracker, generated_code

    outline = replace(outline, example=None)
    stack = CompiledStack()  # type: ignore[no-untyped-call]
    tracker = CompiledTracker(device, stack)
    try:
        with fake_tensors(), tracker:
            pipeline = _labelled_pipeline(
                recipe, plugin_files, device, tracker, stack, outline
            )
            with generated_code():
                # The first update compiles, and has no gradients of a previous one.
                usage = _highest_usage(pipeline, tracker, repetitions=2)
    except (*_NEEDS_NUMBERS, TorchDynamoException) as error:
        reason = str(error).partition("\n")[0]
        raise RunnerError(
            f"{recipe.name}: the compiled update cannot be planned ({reason}); "
            "plan it without --compiled"
        ) from error
    return usage, _active_stages(pipeline)


def _labelled_pipeline(
    recipe: Recipe,
    plugin_files: Sequence[Path],
    device: torch.device,
    tracker: UpdateTracker,
    stack: ModuleStack,
    outline: SourceOutline,
) -> Assembly:
    """Builds the pipeline, and labels everything that exists before its first update."""
    build = outlined(outline)
    pipeline = Assembly(
        recipe, plugin_files, device, recipe.train.batch_size, None, build
    )
    modules = pipeline.learner.modules()
    stack.name_modules(modules)
    tracker.label_state(modules, _optimizers(pipeline))
    return pipeline


def _optimizers(pipeline: Assembly) -> list[torch.optim.Optimizer]:
    return [optimizer for _, optimizer in pipeline.learner.optimizers()]


def _active_stages(pipeline: Assembly) -> tuple[str, ...]:
    return tuple(kind for kind, report in pipeline.reports.items() if report.active)


def _highest_usage(
    pipeline: Assembly, tracker: UpdateTracker, repetitions: int = 1
) -> Usage:
    """Computes updates; returns the usage at the highest point of all.

    Args:
        pipeline: A pipeline whose state is labelled.
        tracker: An active tracker.
        repetitions: How often every update is computed.
    """
    peak = 0
    usage: Usage = {}
    for step in _steps(pipeline, _optimizers(pipeline)):
        inputs = step.draw()
        assert inputs is not None
        tracker.label_batch(inputs.batch, inputs.noise)
        for _ in range(repetitions):
            tracker.reset_peak()
            step(inputs)
            if tracker.peak > peak:
                peak = tracker.peak
                usage = tracker.usage
    return usage


def _steps(
    pipeline: Assembly, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[Step]:
    """Yields the step for every update that has to be computed."""
    step = Step(pipeline)
    if not _make_states(optimizers):
        # The first update makes the states.
        inputs = step.draw()
        assert inputs is not None
        step(inputs)
        del inputs
    period = max(pipeline.learner.periods().values(), default=1)
    # A learner may compute something else in a later phase of the training.
    for fraction in pipeline.recipe.model.phases():
        _advance(pipeline, fraction)
        for _ in range(min(period, _MOST_UPDATES)):
            yield step


def _make_states(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Gives optimizers the state that they have between two updates; returns whether that worked.

    Gradients stay, as they do between two updates.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # Some optimizers need a closure.
        try:
            optimizer.step()
        except TypeError:
            return False
    return True


def _advance(pipeline: Assembly, fraction: float) -> None:
    """Sets the progress of the training to a share of it."""
    progress: Any = pipeline.progress
    unit = "samples" if progress.unit == "epochs" else progress.unit
    setattr(progress, unit, int(fraction * progress.whole))
