"""Explanation of an update that ran out of an accelerator's memory."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import nn

from runner.memory.kinds import by_module, kinds_text
from runner.plugin.registry import Registry
from runner.system.byte_size import format_size
from runner.system.errors import KEEP_BATCH, MemoryShortageError, RunnerError
from runner.system.files import open_file, replacing
from runner.system.suggestions import shown_path
from runner.system.tensor_trees import described, leaves

if TYPE_CHECKING:
    from runner.memory.plan import MemoryPlan
    from runner.plugin.outline import SourceOutline
    from runner.recipe.recipe import Recipe
    from runner.training.pipeline import Assembly
    from runner.training.step import Drawn, Step

KEPT_BATCH = "batch.safetensors"
"""Name of the file with a batch, in the folder of a run."""
# A message names only the largest modules and the best settings.
_MODULES = 3
_SETTINGS = 2


def explain_shortage(
    error: torch.OutOfMemoryError, pipeline: Assembly, step: Step, folder: Path
) -> MemoryShortageError:
    """Returns the message about memory that did not suffice.

    It names the module that requested memory, the memory of the modules at the peak of such an
    update, the shapes of the batch, and the settings that need the least. The memory of the modules
    is computed again without the device.

    Args:
        error: The error of torch.
        pipeline: The training.
        step: The step whose update failed.
        folder: Folder of the run, for the batch if the user wants it.
    """
    # Torch's message continues with advice and statistics.
    summary = ". ".join(str(error).split(". ")[:2])
    number = pipeline.progress.updates + 1
    module = requesting_module(error.__traceback__, pipeline.learner.modules())
    lines = [f"update {number:,}: {module}: {summary}"]
    lines += _allocated(pipeline.device)
    inputs = step.failed
    if inputs is not None:
        lines += _planned(pipeline, inputs)
        lines.append(f"the batch: {described(inputs.batch)}")
        if os.environ.get(KEEP_BATCH):
            path = keep_batch(inputs, folder)
            lines.append(f"it is kept in {shown_path(path)}")
        else:
            lines.append("--keep-batch keeps it as a file")
    return MemoryShortageError("\n    ".join(lines))


def requesting_module(
    trace: TracebackType | None, modules: Mapping[str, nn.Module]
) -> str:
    """Returns the innermost module whose code requested memory, for a message."""
    names = {
        id(submodule): path
        for name, module in modules.items()
        for path, submodule in module.named_modules(prefix=name)
    }
    innermost = ""
    for frame, _ in traceback.walk_tb(trace):
        innermost = names.get(id(frame.f_locals.get("self")), innermost)
    if innermost:
        return f"module {innermost} requested memory"
    return "memory was requested outside of any module's forward"


def keep_batch(inputs: Drawn, folder: Path) -> Path:
    """Writes the tensors of a batch and of its noise into a folder, and returns the file."""
    tensors = {}
    for name, tree in inputs._asdict().items():
        for path, leaf in leaves(tree, name):
            if isinstance(leaf, torch.Tensor):
                tensors[path] = leaf.detach().cpu().contiguous().clone()
    target = folder / KEPT_BATCH
    with (
        replacing(target) as partial,
        open(open_file(partial, os.O_WRONLY | os.O_CREAT), "wb") as file,
    ):
        file.write(save(tensors))
    return target


def _allocated(device: torch.device) -> Iterator[str]:
    """Yields the memory of the allocator, if it has statistics."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    used = format_size(torch.cuda.memory_allocated(device))
    reserved = format_size(torch.cuda.memory_reserved(device))
    total = format_size(torch.cuda.get_device_properties(device).total_memory)
    yield f"the allocator holds {used} in tensors and {reserved} in all; the device has {total}"


def _planned(pipeline: Assembly, inputs: Drawn) -> Iterator[str]:
    """Yields the memory of the largest modules at the peak, and the settings that would help."""
    from runner.memory.outlined import outline_of_batch
    from runner.training.planning import plan_memory

    recipe = pipeline.recipe
    outline = outline_of_batch(pipeline.source, inputs.batch)
    # The message about the shortage must not be lost if the plan fails.
    try:
        plan = plan_memory(recipe, pipeline.plugin_files, outline)
    except Exception as error:
        yield f"the memory of modules could not be computed: {error}"
        return
    largest = list(by_module(plan.usage).items())[:_MODULES]
    modules = ", ".join(
        f"{name} {format_size(sum(kinds.values()))}" for name, kinds in largest
    )
    yield (
        f"such an update needs {format_size(plan.peak)} ({kinds_text(plan.usage)}); "
        f"most of it hold {modules}"
    )
    alternatives = sorted(
        _alternatives(pipeline, plan, outline), key=lambda item: item[1]
    )
    if alternatives:
        settings = [
            f"{setting} ({format_size(peak)})"
            for setting, peak in alternatives[:_SETTINGS]
        ]
        yield f"possible fixes: {' or '.join(settings)}"


def _alternatives(
    pipeline: Assembly, plan: MemoryPlan, outline: SourceOutline
) -> Iterator[tuple[str, int]]:
    """Yields settings with which an update needs less, each with its peak in bytes."""
    from runner.training.planning import plan_memory

    batch_size = pipeline.recipe.train.batch_size
    for setting, candidate in _candidates(pipeline).items():
        # The outline is that of a batch of the recipe's size.
        is_same_size = candidate.train.batch_size == batch_size
        shapes = outline if is_same_size else None
        # Some stages cannot work with some learners.
        try:
            peak = plan_memory(candidate, pipeline.plugin_files, shapes).peak
        except RunnerError:
            continue
        if peak < plan.peak:
            yield setting, peak


def _candidates(pipeline: Assembly) -> dict[str, Recipe]:
    """Returns recipes that may need less memory, by the setting that they change."""
    from runner.training.budget import stage_choices, with_stages

    recipe = pipeline.recipe
    registry = Registry(pipeline.plugin_files)
    candidates = {}
    for kind, choices in stage_choices(recipe, registry).items():
        choice = choices[0]
        settings = choice.settings_text() or "on"
        candidates[f"optimization.{kind}={settings}"] = with_stages(recipe, [choice])
    half = recipe.train.batch_size // 2
    if half:
        smaller = recipe.train.model_copy(update={"batch_size": half})
        candidates[f"train.batch_size={half}"] = replace(recipe, train=smaller)
    return candidates
