"""Explanation of an update that ran out of an accelerator's memory."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

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
    from runner.training.pipeline import Assembly
    from runner.training.step import Drawn, Step

KEPT_BATCH = "batch.safetensors"
"""Name of the file with a batch, in the folder of a run."""
_MODULES, _SETTINGS = 3, 2
"""Modules and settings that a message names."""


def explain_shortage(
    error: torch.OutOfMemoryError, pipeline: Assembly, step: Step, folder: Path
) -> MemoryShortageError:
    """Returns the message about memory that did not suffice.

    It names the module that requested memory, what the modules hold at the peak of such an update, the shapes of the
    batch, and the settings that need the least. What modules hold is computed again without the device.

    Args:
        error: What torch raised.
        pipeline: What is trained.
        step: The step whose update failed.
        folder: Folder of the run, for the batch if the user wants it.
    """
    # torch's message continues with advice and statistics.
    headline = ". ".join(str(error).split(". ")[:2])
    update = pipeline.progress.updates + 1
    parts = [
        f"update {update:,}: {requesting_module(error.__traceback__, pipeline.learner.modules())}: {headline}"
    ]
    parts += _allocated(pipeline.device)
    drawn = step.failed
    if drawn is not None:
        parts += _planned(pipeline, drawn)
        parts.append(f"the batch: {described(drawn.batch)}")
        if os.environ.get(KEEP_BATCH):
            parts.append(f"it is kept in {shown_path(keep_batch(drawn, folder))}")
        else:
            parts.append("--keep-batch keeps it as a file")
    return MemoryShortageError("\n    ".join(parts))


def requesting_module(
    trace: TracebackType | None, modules: Mapping[str, nn.Module]
) -> str:
    """Returns the innermost module whose code requested memory, for a message."""
    names = {
        id(part): path
        for name, module in modules.items()
        for path, part in module.named_modules(prefix=name)
    }
    found = ""
    for frame, _ in traceback.walk_tb(trace):
        found = names.get(id(frame.f_locals.get("self")), found)
    return (
        f"module {found} requested memory"
        if found
        else "memory was requested outside of any module's forward"
    )


def keep_batch(drawn: Drawn, folder: Path) -> Path:
    """Writes the tensors of a batch and of its noise into a folder, and returns the file."""
    tensors = {}
    for name, tree in (("batch", drawn.batch), ("noise", drawn.noise)):
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
    """Yields what the allocator holds, if it has statistics."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    used = format_size(torch.cuda.memory_allocated(device))
    reserved = format_size(torch.cuda.memory_reserved(device))
    total = format_size(torch.cuda.get_device_properties(device).total_memory)
    yield f"the allocator holds {used} in tensors and {reserved} in all; the device has {total}"


def _planned(pipeline: Assembly, drawn: Drawn) -> Iterator[str]:
    """Yields what is held by which module at the peak, and the settings that would help."""
    from runner.memory.outlined import outline_of_batch
    from runner.training.planning import plan_memory

    recipe = pipeline.recipe
    outline = outline_of_batch(pipeline.source, drawn.batch)
    try:
        plan = plan_memory(recipe, pipeline.plugin_files, outline)
    # The message about the shortage must not be lost if there is no plan.
    except Exception as error:
        yield f"the memory of modules could not be computed: {error}"
        return
    largest = list(by_module(plan.usage).items())[:_MODULES]
    held = ", ".join(
        f"{name} {format_size(sum(kinds.values()))}" for name, kinds in largest
    )
    yield f"such an update needs {format_size(plan.peak)} ({kinds_text(plan.usage)}); most of it hold {held}"
    smaller = sorted(_alternatives(pipeline, plan, outline), key=lambda item: item[1])[
        :_SETTINGS
    ]
    if smaller:
        settings = " or ".join(
            f"{setting} ({format_size(peak)})" for setting, peak in smaller
        )
        yield f"possible fixes: {settings}"


def _alternatives(
    pipeline: Assembly, plan: MemoryPlan, outline: SourceOutline
) -> Iterator[tuple[str, int]]:
    """Yields settings with which an update needs less, each with its peak in bytes."""
    from runner.training.budget import stage_choices, with_stages
    from runner.training.planning import plan_memory

    recipe = pipeline.recipe
    candidates: dict[str, Any] = {}
    for kind, choices in stage_choices(recipe, Registry(pipeline.plugin_files)).items():
        choice = choices[0]
        settings = ", ".join(
            f"{name}: {value}" for name, value in choice.choice.settings.items()
        )
        candidates[
            f"optimization.{kind}={{{settings}}}"
            if settings
            else f"optimization.{kind}=on"
        ] = with_stages(recipe, [choice])
    half = recipe.train.batch_size // 2
    if half:
        smaller = recipe.train.model_copy(update={"batch_size": half})
        candidates[f"train.batch_size={half}"] = replace(recipe, train=smaller)
    for setting, candidate in candidates.items():
        shapes = (
            outline if candidate.train.batch_size == recipe.train.batch_size else None
        )
        try:
            peak = plan_memory(candidate, pipeline.plugin_files, shapes).peak
        except RunnerError:  # a stage that cannot work with this learner
            continue
        if peak < plan.peak:
            yield setting, peak
