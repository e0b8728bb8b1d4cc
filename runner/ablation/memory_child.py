"""Child process in which one variant lives while its memory is measured."""

from __future__ import annotations

import dataclasses

import torch

from runner.ablation.memory import MemoryMeter, return_freed_memory
from runner.child.protocol import Parent
from runner.system import generators
from runner.system.hardware import peak_host_memory
from runner.system.processor import set_threads
from runner.training.pipeline import Assembly, assemble


def main(parent: Parent) -> None:
    """Reports the size of a process as it trains, or the memory of its updates.

    The option ``purpose`` is ``process`` or ``update``, ``updates`` is the number of updates.
    """
    is_update = parent.options["purpose"] == "update"
    if is_update:
        return_freed_memory()
    recipe, registry = parent.load()
    generators.seed(recipe.seed)
    set_threads(recipe.system.threads)
    pipeline = assemble(recipe, registry.files)
    if is_update:
        # A stage may have changed the thresholds of this process.
        return_freed_memory()
    meter = MemoryMeter(pipeline, parent.options["updates"])
    meter.warm_up()
    if is_update:
        reports = pipeline.reports.values()
        parent.tell(
            memory=dataclasses.asdict(meter.measure()),
            notes={report.kind: report.notes for report in reports if report.notes},
            threads=torch.get_num_threads(),
        )
    else:
        parent.tell(process=_process_bytes(pipeline))


def _process_bytes(pipeline: Assembly) -> int:
    """Returns what torch reserved on a CUDA device, or the most that this process ever held."""
    if pipeline.device.type == "cuda":
        return torch.cuda.max_memory_reserved(pipeline.device)
    return peak_host_memory()
